"""More that happens to a process: no directory to write to, no room for its log, a clock that jumps.

With tests/e2e/test_kill.py and tests/e2e/test_life_slow.py, the kills, stops and signals, it is `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.bench.processes import free_port
from tests.e2e.command_line import QUIET, SLIPSTREAM
from tests.e2e.server_process import server_process
from tests.e2e.test_life import (
    EXIT_S,
    FLAGS,
    PATH,
    SLOWLY,
    body_of,
    code_of,
    count_of,
    events_left,
    open_stream,
)
from tests.e2e.wire import ask
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOWHERE = "/proc"  # where not even root can make a file
DAY_S = 86_400
START_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("chaos") / "model")


async def test_it_needs_no_directory_to_write_to(model: Path) -> None:
    places = [f"{name}={NOWHERE}/none" for name in ("HOME", "SLIPSTREAM_HOME", "XDG_CACHE_HOME", "HF_HOME")]
    async with server_process(model, *FLAGS, under=("env", "-C", NOWHERE, *places)) as server:
        await server.until_ready()
        reply = await ask(server.url, "POST", PATH, body_of(20))
        assert reply.status == 200
        assert reply.json()["usage"]["completion_tokens"] == 20
        assert os.readlink(f"/proc/{server.process.pid}/cwd") == NOWHERE
        server.signal()
        assert await server.exit_code(EXIT_S) == 0
        assert not server.other_lines


async def test_a_full_disk_under_its_log_changes_nothing(model: Path) -> None:
    port = free_port()
    flags = ["serve", str(model), "--port", str(port), "--log-level", "debug", *FLAGS]
    command = ["sh", "-c", 'exec "$@" >/dev/full 2>/dev/full', "sh", *SLIPSTREAM, *flags]
    env = {**QUIET, "SLIPSTREAM_HOME": str(model.parent / "home"), "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(*command, env=env)
    try:
        await until_ready(url)
        for _ in range(20):
            assert (await ask(url, "POST", PATH, body_of(5))).status == 200
            assert (await ask(url, "POST", PATH, {"prompt": 1.5, "unheard_of": 1})).status == 400
        process.terminate()
        assert await asyncio.wait_for(process.wait(), EXIT_S) == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_ready(url: str) -> None:
    """There is no log to wait for."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                if (await ask(url, "GET", "/ready")).status == 200:
                    return
            except ConnectionError:
                pass
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def shift_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clock's shifter, compiled."""
    library = tmp_path_factory.mktemp("clock") / "clock_shift.so"
    source = Path(__file__).with_name("clock_shift.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def set_clock(shift: Path, days: int) -> None:
    """In place: whoever has the file in its memory must not find it shorter for a moment."""
    with shift.open("r+b") as file:
        file.write(struct.pack("q", days * DAY_S))


async def test_a_clock_that_jumps_ends_nothing_and_delays_nothing(
    model: Path, shift_library: Path, tmp_path: Path
) -> None:
    """A day forward, two back, in the middle of streams, waits, deadlines, and steps under the watchdog."""
    shift = tmp_path / "shift"
    shift.write_bytes(struct.pack("q", 0))
    under = ("env", f"LD_PRELOAD={shift_library}", f"CLOCK_SHIFT_FILE={shift}")
    limits = ("--watchdog-timeout", "5", "--request-timeout", "60", "--queue-timeout", "60")
    flags = (*limits, "--max-num-seqs", "2")
    async with server_process(model, *FLAGS, *flags, faults=SLOWLY, under=under) as server:
        await server.until_ready()
        began = time.monotonic()
        streams = [await open_stream(server.url, 100, deadline_ms=60_000) for _ in range(2)]
        queued = asyncio.create_task(ask(server.url, "POST", PATH, body_of(5, deadline_ms=60_000)))
        for days in (1, -1, 0):
            await asyncio.sleep(0.5)
            set_clock(shift, days)
            assert await code_of(server.url, "/health") == (200, None)
        for stream in streams:
            assert (await events_left(stream, 30))[-1]["choices"][0]["finish_reason"] == "length"
        assert (await asyncio.wait_for(queued, 30)).status == 200
        assert await count_of(server.url, "e2e_request_latency_seconds_sum") < 4 * (time.monotonic() - began)
        set_clock(shift, 1)
        late: dict[str, Any] = body_of(200, deadline_ms=500)
        assert (await ask(server.url, "POST", PATH, late)).status == 504
        after = await ask(server.url, "POST", PATH, body_of(2))
        assert abs(after.json()["created"] - time.time() - DAY_S) < 60  # it is this clock that has jumped
        server.signal()
        assert await server.exit_code(EXIT_S) == 0
