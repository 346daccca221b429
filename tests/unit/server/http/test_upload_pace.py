"""One piece in each turn of the event loop, the tenants in turn, and nothing for those who have gone."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from server.http.upload_pace import UploadPace


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
