"""Batches whose input file is damaged, has gone, or cannot be read for a while."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from server.api.batches import runner
from server.api.batches.line_scan import LineScan
from server.api.batches.records import Line, StoredBatch
from server.api.batches.store import BatchStore
from tests.e2e.test_batches import client_for, ended, line, rows_of, submit, until
from tests.support.fake_engine import FakeEngine


@pytest.mark.parametrize("damage", ["gone", "cut", "overwritten"])
async def test_lines_whose_file_is_lost_are_told_so_and_stop_no_other_batch(
    tmp_path: Path, damage: str
) -> None:
    async def never(_: int) -> None:
        await asyncio.Event().wait()

    async with client_for(tmp_path, FakeEngine(gate=never)) as client:
        batch = await submit(client, [line("a"), line("b"), line("c")])
        await until(client, batch, lambda each: each.status == "in_progress")
    path = tmp_path / "files" / batch.input_file_id
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: content.index(b"\n") + 9] if damage == "cut" else content[::-1])
    async with client_for(tmp_path) as client:
        other = await submit(client, [line("d")])
        batch = await ended(client, batch)
        num_good = damage == "cut"
        assert (batch.status, batch.request_counts.completed) == ("completed", num_good)
        rows = await rows_of(client, batch.error_file_id)
        assert [row["custom_id"] for row in rows] == ["a", "b", "c"][num_good:]
        assert {row["error"]["code"] for row in rows} == {"input_lost"}
        assert (await ended(client, other)).request_counts.completed == 1


async def test_a_batch_whose_file_is_lost_before_it_was_validated_fails(tmp_path: Path) -> None:
    async with client_for(tmp_path) as client:
        batch = await ended(client, await submit(client, [line("a")]))
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as database, database:
        database.execute("UPDATE batches SET status = 'validating', in_progress_at = NULL, total = 0")
    (tmp_path / "files" / batch.input_file_id).unlink()
    async with client_for(tmp_path) as client:
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert (batch.status, [each.code for each in batch.errors.data]) == ("failed", ["input_lost"])


async def test_a_file_that_cannot_be_read_now_is_validated_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_too_many(*_: Any) -> None:
        tries.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    tries: list[float] = []
    monkeypatch.setattr(runner, "_PAUSE_S", 0.2)
    async with client_for(tmp_path) as client:
        with monkeypatch.context() as starved:
            starved.setattr(LineScan, "read", open_too_many)
            batch = await submit(client, [line("a")])
            batch = await until(client, batch, lambda _: len(tries) > 3)
        assert min(after - before for before, after in pairwise(tries)) >= 0.2
        assert (await ended(client, batch)).request_counts.completed == 1


async def test_a_batch_whose_end_was_kept_and_not_told_is_not_ended_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_batch = BatchStore.end_batch

    def end(store: BatchStore, batch_id: str, ending: str) -> StoredBatch:
        found = end_batch(store, batch_id, ending)
        calls.append(ending)
        if len(calls) == 1:
            raise sqlite3.OperationalError("disk I/O error")  # what is read behind the commit
        return found

    calls: list[str] = []
    monkeypatch.setattr(runner, "_PAUSE_S", 0.05)
    monkeypatch.setattr(BatchStore, "end_batch", end)
    async with client_for(tmp_path) as client:
        batch = await submit(client, [line("a")])
        await until(client, batch, lambda _: len(calls) == 2)
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == ["a"]


async def test_a_folder_among_the_files_is_left_alone(tmp_path: Path) -> None:
    """File systems have some of their own: lost+found, .snapshot, @eaDir."""
    (tmp_path / "files" / "lost+found").mkdir(parents=True)
    (tmp_path / "files" / "stray").touch()
    async with client_for(tmp_path) as client:
        batch = await ended(client, await submit(client, [line("a")]))
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == ["a"]
    left = {path.name for path in (tmp_path / "files").iterdir()}
    assert left == {"lost+found", batch.input_file_id, batch.output_file_id}


async def test_lines_that_were_begun_with_are_not_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, add_lines = BatchStore.begin, BatchStore.add_lines

    def begin_untold(store: BatchStore, batch_id: str) -> StoredBatch:
        found = begin(store, batch_id)
        begun.append(batch_id)
        if len(begun) == 1:
            raise sqlite3.OperationalError("disk I/O error")  # what is read behind the commit
        return found

    def add_until_full(store: BatchStore, batch_id: str, lines: Sequence[Line]) -> None:
        if begun:
            refused.append(batch_id)
            raise sqlite3.OperationalError("database or disk is full")
        add_lines(store, batch_id, lines)

    begun, refused = list[str](), list[str]()
    monkeypatch.setattr(runner, "_PAUSE_S", 0.05)
    with monkeypatch.context() as full:
        full.setattr(BatchStore, "begin", begin_untold)
        full.setattr(BatchStore, "add_lines", add_until_full)
        async with client_for(tmp_path) as client:
            batch = await submit(client, [line("a"), line("b")])
            await until(client, batch, lambda each: bool(refused) or each.status == "completed")
    async with client_for(tmp_path) as client:
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == ["a", "b"]
