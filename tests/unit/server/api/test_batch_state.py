"""The end of a server's files and batches, as a drain and what comes behind it ask for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from server.api.batches.state import BatchState
from server.api.batches.store import BatchStore
from server.http.errors import ApiError


async def test_who_closes_again_waits_for_what_a_cancelled_call_began(tmp_path: Path) -> None:
    state, is_begun, may_end = BatchState(tmp_path), threading.Event(), threading.Event()

    def write(_: BatchStore) -> None:
        is_begun.set()
        may_end.wait(30)

    writing = asyncio.create_task(state.run(write))
    await asyncio.to_thread(is_begun.wait, 30)
    first = asyncio.create_task(state.close())
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(state.close())
    await asyncio.wait({first})
    assert not second.done()

    may_end.set()
    await second
    await writing
    BatchStore(tmp_path).close()  # nobody keeps the folder
    with pytest.raises(ApiError, match="shutting down"):
        await state.run(BatchStore.open_batches)
