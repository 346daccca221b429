"""One piece in each turn of the event loop, the tenants in turn, and nothing for those who have gone.

And as much at a time of each tenant as there is room for.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from server.http.errors import ApiError
from server.http.upload_pace import UploadPace, UploadRoom


async def begun(pace: UploadPace, read: list[str], *names: str) -> list[asyncio.Task[None]]:
    """One who waits for each name, which begins with the tenant's; they are in line in this order."""

    async def upload(name: str) -> None:
        await pace.turn(name[0])
        read.append(name)

    tasks = [asyncio.create_task(upload(name)) for name in names]
    await asyncio.sleep(0)
    return tasks


async def test_the_tenants_take_turns_and_each_of_them_in_order() -> None:
    pace, read = UploadPace(), list[str]()
    await asyncio.gather(*await begun(pace, read, "a1", "a2", "a3", "b1", "c1", "b2"))
    assert read == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_one_piece_is_read_in_each_turn_of_the_loop() -> None:
    pace, read = UploadPace(), list[str]()
    tasks = await begun(pace, read, *(f"a{number}" for number in range(50)))
    counts = []
    while len(read) < 50:
        counts.append(len(read))
        await asyncio.sleep(0)
    assert all(after - before <= 1 for before, after in itertools.pairwise(counts))
    await asyncio.gather(*tasks)


async def test_who_has_gone_takes_no_turn_and_the_next_are_served() -> None:
    pace, read = UploadPace(), list[str]()
    tasks = await begun(pace, read, "a1", "a2", "b1")
    tasks[0].cancel()
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    await tasks[1]
    assert read == ["a2"]
    await asyncio.gather(*await begun(pace, read, "b2"))
    assert read == ["a2", "b2"]


async def entering(room: UploadRoom, entered: list[str], *names: str) -> list[asyncio.Task[None]]:
    """One body of ten bytes for each name, which begins with the tenant's."""

    async def enter(name: str) -> None:
        await room.enter(name[0], 10)
        entered.append(name)

    tasks = [asyncio.create_task(enter(name)) for name in names]
    await asyncio.sleep(0)
    return tasks


async def test_a_tenant_sends_as_much_at_a_time_as_there_is_room_for() -> None:
    room, entered = UploadRoom(25, 8), list[str]()
    tasks = await entering(room, entered, "a1", "a2", "a3", "a4", "b1")
    assert entered == ["a1", "a2", "b1"]
    room.leave("a", 10)
    await asyncio.sleep(0)
    assert entered == ["a1", "a2", "b1", "a3"]
    room.leave("a", 10)
    await asyncio.gather(*tasks)
    assert entered[-1] == "a4"


async def test_a_body_larger_than_the_room_gets_in_alone() -> None:
    room, entered = UploadRoom(5, 8), list[str]()
    tasks = await entering(room, entered, "a1", "a2")
    assert entered == ["a1"]
    room.leave("a", 10)
    await asyncio.gather(*tasks)


async def test_who_has_gone_takes_no_room() -> None:
    room, entered = UploadRoom(10, 8), list[str]()
    tasks = await entering(room, entered, "a1", "a2", "a3", "a4")
    tasks[1].cancel()
    await asyncio.wait({tasks[1]})
    room.leave("a", 10)  # and the third leaves at the moment it is let in
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == ["a1", "a4"]
    room.leave("a", 10)
    await asyncio.gather(*await entering(room, entered, "a5"))


async def test_too_many_that_wait_are_refused() -> None:
    room = UploadRoom(10, 1)
    tasks = await entering(room, [], "a1", "a2")
    with pytest.raises(ApiError) as refusal:
        await room.enter("a", 10)
    assert (refusal.value.reply.status, refusal.value.reply.code) == (503, "queue_full")
    await room.enter("b", 10)
    room.leave("a", 10)
    await asyncio.gather(*tasks)


async def test_who_has_gone_does_not_count_as_waiting() -> None:
    room, entered = UploadRoom(10, 2), list[str]()
    tasks = await entering(room, entered, "a1", "a2", "a3")
    tasks[2].cancel()
    await asyncio.wait({tasks[2]})
    tasks += await entering(room, entered, "a4")
    for _ in range(2):
        room.leave("a", 10)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == ["a1", "a2", "a4"]
