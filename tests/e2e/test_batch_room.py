"""What a client can have kept in --state-dir is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.api.batches import routes
from tests.e2e.test_batches import client_for, ended, line, submit
from tests.support.fake_engine import FakeEngine


async def test_the_batches_that_ended_first_make_room_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gate(_: int) -> None:
        if len(engine.streams) == 1:
            await asyncio.Event().wait()

    monkeypatch.setattr(routes, "MAX_KEPT", 3)
    engine = FakeEngine(gate=gate)
    async with client_for(tmp_path, engine) as client:
        still_open = await submit(client, [line("a")])
        while not engine.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        made = [await ended(client, await submit(client, b"wrong")) for _ in range(6)]
        assert {each.status for each in made} == {"failed"}
        kept = [each.id for each in (await client.batches.list()).data]
        assert kept == [each.id for each in (*reversed(made[-3:]), still_open)]
