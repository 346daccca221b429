"""Bodies that arrive share a bounded room; small ones need none, and what is taken is given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from server.http.body_room import FREE_BYTES, MIN_BODIES, BodyRoom
from server.http.client import ClientGone, read_body
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
    senders = [Sender(b"x" * MAX_BODY) for _ in range(MIN_BODIES)]
    readers = [asyncio.create_task(read_body(each.receive, MAX_BODY, room)) for each in senders]
    extra: list[Sender] = []

    async def read_one(size: int) -> Any:
        sender = Sender(b"x" * size)
        extra.append(sender)
        sender.next.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        return await read_body(sender.receive, MAX_BODY, room)

    for sender in senders:
        await sender.waits.wait()
    assert len(await read_one(FREE_BYTES)) == FREE_BYTES
    room.num_taken = room.limit  # what is left by the free part of each is not enough for one more
    with pytest.raises(ApiError) as refusal:
        await read_one(FREE_BYTES + 1)
    assert refusal.value.reply.status == 503
    assert refusal.value.reply.headers["retry-after"] == "1"
    assert str(room.limit) in refusal.value.reply.message
    room.num_taken = MIN_BODIES * (MAX_BODY - FREE_BYTES)

    senders[0].next.put_nowait({"type": "http.disconnect"})
    for sender in senders[1:]:
        sender.next.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(ends[0], ClientGone)
    assert all(isinstance(end, bytes) and len(end) == MAX_BODY for end in ends[1:])
    assert room.num_taken == 0


async def test_a_refused_body_gives_its_room_back() -> None:
    room = BodyRoom(MAX_BODY)
    with pytest.raises(ApiError):
        await read_body(Sender(b"x" * (MAX_BODY + 1)).receive, MAX_BODY, room)
    room.num_taken = room.limit - 1
    with pytest.raises(ApiError):
        await read_body(Sender(b"x" * MAX_BODY).receive, MAX_BODY, room)
    assert room.num_taken == room.limit - 1
