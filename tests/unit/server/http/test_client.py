"""ClientMiddleware against hand-made ASGI messages: whose cancellation is whose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from config import ServerSettings
from server.http.client import ClientGone, ClientMiddleware

SCOPE: dict[str, Any] = {"type": "http", "headers": []}


class Connection:
    """What the server side of a connection says: a whole body, then, when told, that the client left."""

    def __init__(self, *bodies: bytes) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.messages = [
            {"type": "http.request", "body": body, "more_body": i < len(bodies) - 1}
            for i, body in enumerate(bodies)
        ]

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def middleware(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> ClientMiddleware:
    return ClientMiddleware(app, ServerSettings())


async def test_the_body_comes_in_one_piece_and_then_nothing() -> None:
    found = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        found.append(await receive())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await receive()

    connection = Connection(b"ab", b"", b"c")
    await middleware(app)(SCOPE, connection.receive, connection.send)
    assert found == [{"type": "http.request", "body": b"abc", "more_body": False}]


async def test_leaving_cancels_and_says_so() -> None:
    connection = Connection(b"")
    cleaned = asyncio.Event()

    async def app(*_: object) -> None:
        connection.left.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.set()

    with pytest.raises(ClientGone):
        await middleware(app)(SCOPE, connection.receive, connection.send)
    task = asyncio.current_task()
    assert cleaned.is_set()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancel_from_outside_stays_one() -> None:
    connection = Connection(b"")
    started = asyncio.Event()

    async def app(*_: object) -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(middleware(app)(SCOPE, connection.receive, connection.send))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaving_after_the_last_byte_cancels_nothing() -> None:
    connection = Connection(b"")

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})
        connection.left.set()
        await asyncio.sleep(0.01)

    await middleware(app)(SCOPE, connection.receive, connection.send)
    assert len(connection.sent) == 2


async def test_leaving_before_the_body_is_there() -> None:
    connection = Connection()
    connection.left.set()

    async def app(*_: object) -> None:
        raise AssertionError("nobody asked")

    with pytest.raises(ClientGone):
        await middleware(app)(SCOPE, connection.receive, connection.send)


async def test_other_protocols_pass_untouched() -> None:
    seen = []

    async def app(scope: Scope, *_: object) -> None:
        seen.append(scope["type"])

    connection = Connection()
    await middleware(app)({"type": "lifespan"}, connection.receive, connection.send)
    assert seen == ["lifespan"]
