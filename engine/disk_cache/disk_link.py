"""DiskLink: has blocks written to disk and read from there, beside the steps and beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from engine.disk_cache.block_files import BlockFiles
from engine.loop.daemon_executor import DaemonExecutor
from engine.plan.kv.disk_tier import DiskLookUp, DiskTier
from engine.plan.kv.prefix_cache import extend_block_hashes, owner_tag
from engine.plan.metrics.batch_metrics import BatchMetrics

log = logging.getLogger("slipstream.engine")

_WRITE_BATCH = 16  # blocks: what is published while they are written comes with the next


class DiskLink:
    """Carries out what a DiskTier decides, with files, on two threads: one reads, one writes.

    A request waits no longer for its blocks than computing them takes. What fails is logged and counted, and
    nothing more is written until something else is published. Loop thread only.
    """

    def __init__(self, tier: DiskTier, files: BlockFiles, block_size: int) -> None:
        self._tier = tier
        self._files = files
        self._block_size = block_size
        self._reader, self._writer = DaemonExecutor("disk-read"), DaemonExecutor("disk-write")
        self._one_read = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_writing = False

    def start(self, metrics: BatchMetrics, resume: Callable[[str], None]) -> None:
        """Begin; `resume` lets a request go on that is held for what may be on disk."""
        self._metrics = metrics
        self._resume = resume
        self._tier.on_look_up = lambda look_up: self._spawn(self._fetch(look_up))
        self._tier.on_unwritten = self._write_behind

    async def flush(self) -> None:
        """Return when all is written that was published by now."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """Take no more work; what is being written may be lost."""
        self._files.close()
        for executor in (self._reader, self._writer):
            executor.shutdown(wait=False, cancel_futures=True)
        for task in self._tasks:
            task.cancel()

    def forget(self, owner: str | None) -> None:
        """Delete what is on disk of this owner's, of all if None."""
        self._spawn(self._run(self._writer, self._files.forget, owner_tag(owner)))

    async def _fetch(self, look_up: DiskLookUp) -> None:
        """Read what there is of a prompt; its request goes on then, or when that takes too long."""
        resume = partial(self._go_on, look_up.request_id)
        timer = None
        if look_up.limit_s is not None:
            timer = asyncio.get_running_loop().call_later(look_up.limit_s, resume)
        try:
            names = await self._run(self._reader, self._find, look_up)
            if len(names) > look_up.num_found:
                async with self._one_read:  # who begins alike finds the blocks in memory then
                    await self._read(look_up.request_id, names)
        finally:
            if timer is not None:
                timer.cancel()
            resume()

    def _find(self, look_up: DiskLookUp) -> list[bytes]:
        """The names of the prompt's first blocks that are in memory or on disk."""
        names: list[bytes] = []
        extend_block_hashes(names, look_up.token_ids, self._block_size, look_up.num_blocks, look_up.salt)
        return names[: look_up.num_found + self._files.count_stored(names[look_up.num_found :])]

    async def _read(self, request_id: str, names: list[bytes]) -> None:
        read = self._tier.begin_read(request_id, names)
        if read is None:
            return
        num_good, began = 0, time.perf_counter()
        try:
            num_good = await self._run(self._reader, self._files.read, *read)
        finally:
            self._tier.end_read(read, num_good, time.perf_counter() - began)
        self._metrics.prefix_cache_disk_read_blocks += num_good
        self._spawn(self._run(self._writer, self._files.touch, read.names[:num_good]))  # nobody waits for it

    def _go_on(self, request_id: str) -> None:
        self._tier.end_asking(request_id)
        self._resume(request_id)

    def _write_behind(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self._spawn(self._write())

    async def _write(self) -> None:
        try:
            while self._tier.has_unwritten:
                batch = self._tier.begin_write(_WRITE_BATCH)
                write = partial(self._files.write, *batch, self._tier.is_unchanged)
                num_written = await self._run(self._writer, write)
                self._metrics.prefix_cache_disk_written_blocks += num_written
                await self._run(self._writer, self._files.touch, self._tier.take_touched())
        finally:
            self._tier.end_write()
            self._is_writing = False

    async def _run(self, executor: DaemonExecutor, call: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *args)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="slipstream-disk")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.count_error("disk")
            log.warning("the prefix cache on disk could not be used: %s", error)
