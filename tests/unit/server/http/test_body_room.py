"""All requests share a bounded room; small ones need none of it, and what is taken is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from sys import getrefcount, getsizeof
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from config import ServerSettings
from server.http.body_room import FREE_BYTES, LEAST_BYTES, MAX_BODIES, BodyRoom, Lease, lease_of, parsed_bytes
from server.http.client import ClientGone, ClientMiddleware, read_body
from server.http.context import EXCHANGE_KEY, Exchange
from server.http.errors import ApiError

MAX_BODY = 4 * FREE_BYTES


class Sender:
    """Sends one large piece, then waits to be told how it goes on."""

    def __init__(self, piece: bytes) -> None:
        self.next: asyncio.Queue[Message] = asyncio.Queue()
        self.next.put_nowait({"type": "http.request", "body": piece, "more_body": True})
        self.waits = asyncio.Event()  # all that was sent has been taken

    async def receive(self) -> Message:
        if self.next.empty():
            self.waits.set()
        return await self.next.get()


async def test_large_bodies_wait_for_nobody_and_small_ones_need_no_room() -> None:
    room = BodyRoom(MAX_BODY)
    leases = [Lease(room) for _ in range(4)]
    senders = [Sender(b"x" * MAX_BODY) for _ in leases]
    readers = [
        asyncio.create_task(read_body(sender.receive, MAX_BODY, lease))
        for sender, lease in zip(senders, leases, strict=True)
    ]

    async def read_one(size: int) -> Any:
        sender = Sender(b"x" * size)
        sender.next.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        return await read_body(sender.receive, MAX_BODY, Lease(room))

    for sender in senders:
        await sender.waits.wait()
    taken = room.num_taken
    assert taken == len(senders) * (MAX_BODY - FREE_BYTES)
    room.num_taken = room.limit
    assert len(await read_one(FREE_BYTES)) == FREE_BYTES
    with pytest.raises(ApiError) as refusal:
        await read_one(FREE_BYTES + 1)
    assert refusal.value.reply.status == 503
    assert refusal.value.reply.headers["retry-after"] == "1"
    assert str(room.limit) in refusal.value.reply.message
    room.num_taken = taken

    senders[0].next.put_nowait({"type": "http.disconnect"})
    for sender in senders[1:]:
        sender.next.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(ends[0], ClientGone)
    assert all(isinstance(end, bytearray) and len(end) == MAX_BODY for end in ends[1:])
    for lease in leases:
        lease.release()
        lease.release()
    assert room.num_taken == 0


def test_the_room_holds_what_is_made_of_any_single_body() -> None:
    for max_body in (1024, 8 * 2**20):
        room = BodyRoom(max_body)
        assert room.limit == max(LEAST_BYTES, MAX_BODIES * max_body)
        for piece in (b"[],", b'"a":{},', b"\\u00e9", b"1,", b"{:,["):
            body = piece * (max_body // len(piece))
            assert parsed_bytes(body) + len(body) < room.limit


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (b"[" + b",".join([b"123456"] * 50_000) + b"]", lambda value: 50_000 * 40),
        (b'["' + b"a" * 100_000 + b'"]', lambda value: len(value[0])),
        (b'["' + ("a" * 99_999 + "\U0001f642").encode() + b'"]', lambda value: 400_000),
        (b"[" + b",".join([b"{}"] * 10_000) + b"]", lambda value: 10_000 * 72),
        (b"{" + b",".join(b'"k%d":1' % i for i in range(10_000)) + b"}", lambda value: getsizeof(value)),
    ],
)
def test_what_a_body_becomes_is_not_reckoned_too_low(body: bytes, made: Callable[[Any], int]) -> None:
    assert parsed_bytes(body) >= made(json.loads(body))


async def test_a_request_gives_its_room_back_when_it_ends_and_not_before() -> None:
    rooms: list[int] = []
    body = b'{"prompt": "' + b"a" * 300_000 + b'"}'

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        lease = lease_of(scope)
        rooms.append(lease.num_bytes)
        message = await receive()
        num_holders = getrefcount(message["body"])
        assert num_holders == 2  # the message and that call: nobody else keeps it
        lease.hold(1000)
        rooms.append(lease.num_bytes)
        if len(rooms) > 2:
            raise ZeroDivisionError

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def send(_: Message) -> None:
        raise AssertionError

    client = ClientMiddleware(app, ServerSettings())
    waiting = [{"type": "http.request", "body": body}]
    await client({"type": "http", "headers": []}, receive, send)
    waiting = [{"type": "http.request", "body": body}]
    with pytest.raises(ZeroDivisionError):
        await client({"type": "http", "headers": []}, receive, send)
    assert rooms == [len(body), 1000] * 2
    assert client._room.num_taken == 0


async def test_a_tenant_s_next_large_body_is_not_read_before_others_of_it_are_parsed() -> None:
    reading: list[str] = []
    parsed = {name: asyncio.Event() for name in ("a1", "a2", "b1")}
    ended = asyncio.Event()

    async def request(name: str) -> None:
        exchange = Exchange(None)
        exchange.tenant = name[0]
        headers = [(b"content-length", b"%d" % (3 * MAX_BODY)), (b"content-type", b"application/json")]

        async def receive() -> Message:
            if name in reading:
                await asyncio.get_running_loop().create_future()
            reading.append(name)
            return {"type": "http.request", "body": b"{}"}

        async def app(scope: Scope, receive: Receive, _send: Send) -> None:
            await parsed[name].wait()
            lease_of(scope).upload.close()
            await ended.wait()

        async def send(_: Message) -> None:
            raise AssertionError

        scope = {"type": "http", "headers": headers, EXCHANGE_KEY: exchange, "app": app}
        await middleware(scope, receive, send)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["app"](scope, receive, send)

    middleware = ClientMiddleware(route, ServerSettings(max_body_bytes=3 * MAX_BODY))
    room = middleware._uploads
    await room.enter("a", room._num_bytes - 3 * MAX_BODY)
    requests = [asyncio.create_task(request(name)) for name in parsed]
    await asyncio.sleep(0.01)
    assert reading == ["a1", "b1"]
    parsed["a1"].set()
    await asyncio.sleep(0.01)
    assert reading == ["a1", "b1", "a2"]
    ended.set()
    for each in parsed.values():
        each.set()
    await asyncio.gather(*requests)
    room.leave("a", room._num_bytes - 3 * MAX_BODY)
    assert not room._taken and not room._waiting
