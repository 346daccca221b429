"""Running the command line from a test, in this process or in another."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from server.commands import cli
from tests.support.fake_engine import FakeEngine
from tests.support.native import WITHOUT_KERNELS

_OURS = "SLIPSTREAM_"
# Models this small gain nothing from a second thread, and each operation waits for it where other tests run.
ONE_THREAD = {"OMP_THREAD_LIMIT": "1"}
QUIET = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
QUIET |= WITHOUT_KERNELS | ONE_THREAD
SLIPSTREAM = (sys.executable, "-c", "import sys; from server.commands.cli import main; sys.exit(main())")


async def command(*argv: str) -> int:
    """The command line in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(cli.main, argv)


def fast_engine(**fields: Any) -> FakeEngine:
    """A fake engine with room for the prompts of a benchmark."""
    return FakeEngine(max_model_len=4096, **fields)
