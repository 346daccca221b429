"""ClientMiddleware: the one owner of `receive`. Reads the body under its cap, then watches the client.

A client that leaves cancels the task that serves it, wherever that task waits; `finally` blocks do the rest.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config import ServerSettings
from server.http.body_room import FREE_BYTES, BodyRoom, Lease, give_lease
from server.http.context import exchange_of
from server.http.errors import INVALID, ApiError, ErrorReply
from server.http.peer import peer_of
from server.http.upload_pace import UploadPace, UploadRoom

_MAX_UPLOADS = 4  # bodies of the largest size that a tenant may send at once
UPLOAD_PATH = "/v1/files"  # whose bodies are files: too large to be held in memory
_LINE_BYTES = 4  # of a header: the colon, the space, the end of the line
_MAX_DIGITS = 18


class ClientGone(Exception):
    """The client closed its connection before the reply was complete: no answer can reach it."""


class ClientMiddleware:
    """Gives the inner application a complete body, and cancels it when the client goes."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._settings = settings
        self._room = BodyRoom(settings.max_body_bytes)
        self._pace = UploadPace()
        self._uploads = UploadRoom(_MAX_UPLOADS * settings.max_body_bytes, settings.max_queued_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ClientGone when the client left before the end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        lease = give_lease(scope, self._room)
        if scope.get("path") == UPLOAD_PATH and scope.get("method") == "POST":
            try:
                await self._pass_on(scope, self._paced(scope, receive), send)
            finally:
                lease.release()
            return
        try:
            watch = _Watch(receive, send, await self._read(scope, receive, lease))
        except ApiError as error:
            lease.release()
            await error.reply.send(scope, receive, send)
            return
        except BaseException:
            lease.release()
            raise
        try:
            await watch.run(self.app, scope)
        finally:
            lease.release()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the route read the body itself, a piece at a time. Raises ClientGone."""
        peer = peer_of(scope)

        async def receive_well() -> Message:
            message = await receive()
            peer.check()  # its fault may have ended the body
            return message

        try:
            peer.check()
            check_size(scope, self._settings)
        except ApiError as error:
            await error.reply.send(scope, receive, send)
            return
        await self.app(scope, receive_well, send)

    def _paced(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, which waits its turn once more has come than an ordinary request has."""
        num_bytes = 0

        async def receive_in_turn() -> Message:
            nonlocal num_bytes
            if num_bytes > FREE_BYTES:
                await self._pace.turn(exchange_of(scope).tenant)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return message

        return receive_in_turn

    async def _read(self, scope: Scope, receive: Receive, lease: Lease) -> bytearray:
        """The whole body, which from here on is the watch's alone. Raises ApiError or ClientGone."""
        peer = peer_of(scope)
        peer.check()
        size = check_head(scope, self._settings)
        tenant = exchange_of(scope).tenant if size > FREE_BYTES else None
        if tenant is not None:
            await self._uploads.enter(tenant, size)
            lease.upload.callback(self._uploads.leave, tenant, size)
            peer.check()  # the wait may have been long
        body = await read_body(self._paced(scope, receive), self._settings.max_body_bytes, lease)
        peer.check()  # its fault may have ended the body
        return body


def check_head(scope: Scope, settings: ServerSettings) -> int:
    """The size of the body that is announced, the largest there may be for one that comes in chunks.

    Raises ApiError by the headers alone: too large, a body announced too large, or one that is not JSON or is
    compressed.
    """
    check_size(scope, settings)
    found = dict(scope["headers"])
    announced = announced_length(found.get(b"content-length", b"0"))
    if announced > settings.max_body_bytes:
        raise _body_too_large(settings.max_body_bytes)
    is_chunked = b"transfer-encoding" in found
    if (announced or is_chunked) and not is_json(found.get(b"content-type", b"")):
        message = "The body must be JSON: send it with 'content-type: application/json'."
        raise ApiError(ErrorReply(415, INVALID, message, code="unsupported_media_type"))
    coding = found.get(b"content-encoding", b"").strip().lower()
    if (announced or is_chunked) and coding not in (b"", b"identity"):
        message = "The body is compressed, which is not read here: send it without 'content-encoding'."
        headers = {"accept-encoding": "identity"}
        raise ApiError(ErrorReply(415, INVALID, message, code="unsupported_media_type", headers=headers))
    return settings.max_body_bytes if is_chunked else announced


def check_size(scope: Scope, settings: ServerSettings) -> None:
    """Refuse headers that are too large."""
    headers = scope["headers"]
    size = sum(len(name) + len(value) + _LINE_BYTES for name, value in headers)
    size += len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
    if size > settings.max_header_bytes:
        message = f"The headers take {size} bytes; the limit is {settings.max_header_bytes}."
        raise ApiError(ErrorReply(431, INVALID, message, code="headers_too_large"))


def announced_length(value: bytes) -> int:
    """A content-length as a number, 0 for none; what no body could have is a large one."""
    digits = value.lstrip(b"0")
    if not digits.isdigit():
        return 0
    return int(digits) if len(digits) < _MAX_DIGITS else 10**_MAX_DIGITS


def is_json(content_type: bytes) -> bool:
    """Whether a content type is JSON's own or one built on it."""
    media_type = content_type.split(b";")[0].strip().lower()
    return media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    )


def _body_too_large(limit: int) -> ApiError:
    message = f"The body is larger than the limit of {limit} bytes."
    return ApiError(ErrorReply(413, INVALID, message, code="body_too_large"))


async def read_body(receive: Receive, limit: int, lease: Lease) -> bytearray:
    """The whole body; never holds more than `limit`, what the lease's room has, and one network read.

    Raises ApiError or ClientGone; the lease is the caller's to release.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _body_too_large(limit)
        lease.hold(len(body))
        more = message.get("more_body", False)
    return body


@dataclass(slots=True)
class _Watch:
    """One request being served while a second task waits for its client to leave."""

    receive: Receive
    send: Send
    body: bytearray | None
    gone: bool = field(default=False, init=False)
    answered: bool = field(default=False, init=False)

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run `app`; raises ClientGone in place of the cancellation that a leaving client caused."""
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        watcher = asyncio.create_task(self._wait_for_leaving(task))
        try:
            await app(scope, self._replay, self._send)
        except asyncio.CancelledError:
            if self.gone and task.uncancel() <= num_cancels:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def _wait_for_leaving(self, task: asyncio.Task[object]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self.answered:
            self.gone = True
            task.cancel()

    async def _replay(self) -> Message:
        """The inner `receive`: the body once, then nothing, since a client that leaves cancels the task."""
        if self.body is None:
            await asyncio.get_running_loop().create_future()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.answered = True
        await self.send(message)
