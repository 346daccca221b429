"""Engines with a prefix cache on disk over the fake model, whose text shows every wrong byte of K/V."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.disk_cache.block_files import BlockFiles, private_directory
from engine.disk_cache.disk_link import DiskLink
from engine.loop.engine import Engine
from engine.plan.kv.disk_tier import DiskTier
from tests.support.engines import EngineShape, Harness, make_parts
from tests.support.fakes import FakeRunner

SHAPE = EngineShape(prefix_caching=True, num_blocks=64, max_model_len=200)
TOKEN_S = 0.01  # that computing a token is said to take: a disk is worth while
PADDING = (
    1 << 18
)  # bytes of a block beside its tokens: real ones are large, and written in more than a moment


class FakeBlockBytes:
    """The blocks of a fake runner: their tokens, and padding that follows from these."""

    batch = 16

    def __init__(self, runner: FakeRunner) -> None:
        self.block_bytes = runner.block_size * 8 + PADDING
        self._rows = runner.slots.reshape(-1, runner.block_size)
        self._outgoing, self._incoming = ([np.zeros(PADDING, np.uint8) for _ in range(16)] for _ in "oi")

    def outgoing(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """Tokens and padding."""
        for block_id, padding in zip(block_ids, self._outgoing, strict=False):
            padding[:] = _padding_of(self._rows[block_id])
        return self._pieces(block_ids, self._outgoing)

    def incoming(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """Places for both; another thread may be at `outgoing`."""
        return self._pieces(block_ids, self._incoming)

    def accept(self, block_ids: Sequence[int]) -> None:
        """Raises AssertionError if padding and tokens were not written together."""
        for block_id, padding in zip(block_ids, self._incoming, strict=False):
            assert (padding == _padding_of(self._rows[block_id])).all(), "a block is torn"

    def _pieces(
        self, block_ids: Sequence[int], paddings: Sequence[np.ndarray]
    ) -> Sequence[Sequence[memoryview]]:
        return [
            [memoryview(self._rows[block_id]).cast("B"), padding.data]
            for block_id, padding in zip(block_ids, paddings, strict=False)
        ]


def _padding_of(tokens: np.ndarray) -> int:
    return int(tokens.sum()) % 251


@asynccontextmanager
async def disk_engine(
    directory: Path,
    shape: EngineShape = SHAPE,
    *,
    max_bytes: int = 1 << 30,
    kind: type[BlockFiles] = BlockFiles,
) -> AsyncIterator[Harness]:
    """A started engine that keeps its K/V in `directory`; on leaving it is stopped, all of it written."""
    runner = FakeRunner(shape.num_blocks, shape.block_size, num_host_blocks=shape.num_host_blocks)
    runner.seconds = lambda inputs: (TOKEN_S * len(inputs.token_ids), 0.0)
    parts = make_parts(shape, runner)
    files = kind(private_directory(directory), "fake", FakeBlockBytes(runner), max_bytes)
    tier = DiskTier(parts.batcher.kv, parts.batcher.rates)
    parts.batcher.running.lookup.disk = tier
    parts = replace(parts, prefix_store=DiskLink(tier, files, shape.block_size))
    engine = Engine(lambda: parts)
    await engine.start()
    harness = Harness(engine, parts, runner)
    try:
        yield harness
        await engine.drain(10)
    finally:
        await engine.stop()
    harness.assert_quiet()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "slipstream-disk"]
