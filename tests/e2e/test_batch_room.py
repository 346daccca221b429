"""What a client can have kept in --state-dir is bounded: batches that ended, and what they wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from server.api.batches import routes
from tests.e2e.test_batches import COMPLETIONS, client_for, ended, jsonl, line, submit, until
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
        still_open = await until(client, await submit(client, [line("a")]), lambda _: bool(engine.streams))
        made = [await ended(client, await submit(client, b"wrong")) for _ in range(6)]
        assert {each.status for each in made} == {"failed"}
        kept = [each.id for each in (await client.batches.list()).data]
        assert kept == [each.id for each in (*reversed(made[-3:]), still_open)]


async def test_no_batch_is_taken_whose_output_finds_no_room(tmp_path: Path) -> None:
    async with client_for(tmp_path, max_file_size=1000) as client:
        file = await client.files.create(file=("in", jsonl([line("a")])), purpose="batch")
        for _ in range(19):
            other = await client.files.create(file=("in", bytes(1000)), purpose="batch")
        assert (await client.files.create(file=("in", bytes(1000)), purpose="batch")).bytes == 1000
        with pytest.raises(openai.InternalServerError) as refusal:
            await client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        assert (refusal.value.status_code, refusal.value.code) == (507, "insufficient_storage")
        await client.files.delete(other.id)
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        assert (await ended(client, batch)).status == "completed"
