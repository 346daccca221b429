"""The engine with all its parts over a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from config import load_settings
from engine import Engine, build_engine
from tests.support.native import WITHOUT_KERNELS
from tests.support.speculated import single_threaded


@asynccontextmanager
async def real_engine(directory: Path, *flags: str) -> AsyncIterator[Engine]:
    """A tiny model in reach of the server; the server does not start it."""
    common = ("--dtype", "float32", "--kv-cache-memory", "16MiB")
    with single_threaded():
        engine = build_engine(load_settings([str(directory), *common, *flags], environ=WITHOUT_KERNELS))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()
        assert engine.gauges().kv_blocks_used == 0  # by then: what is read ahead ends with its step
