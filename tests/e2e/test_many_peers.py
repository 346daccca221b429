"""A real server among more clients than it can have: out of files, and a thousand that never read."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.raw_peer import narrow_wire
from tests.e2e.server_process import ServerProcess, server_process
from tests.e2e.wire import Wire, ask
from tests.support.sse_reader import room_for_sockets
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATH = "/v1/completions"
FLAGS = ("--speculative-method", "none", "--kv-cache-memory", "64MiB")
MAX_FILES, NUM_CLIENTS, READ_TIMEOUT_S = 256, 400, 5.0
NUM_READERS, STALL_TIMEOUT_S = 100, 2.0
SLOWLY = [{"point": "forward_sleep", "count": -1, "seconds": 0.05}]  # longer than a stall takes to show
BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model")


def files_of(server: ServerProcess) -> int:
    return int(psutil.Process(server.process.pid).num_fds())


def seconds_of(server: ServerProcess) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


async def text_of(url: str) -> str:
    reply = await ask(url, "POST", PATH, BODY)
    assert reply.status == 200
    text: str = reply.json()["choices"][0]["text"]
    return text


async def served_within(url: str, limit_s: float) -> None:
    """Return at the first 200; until then a client is told 503 or is closed."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                reply = await ask(url, "POST", PATH, BODY)
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
                continue
            if reply.status == 200:
                return
            assert (reply.status, reply.json()["error"]["code"]) == (503, "too_many_connections")
            await asyncio.sleep(0.1)


async def test_out_of_files_a_server_stays_calm_and_comes_back(model: Path) -> None:
    under = ("sh", "-c", f'ulimit -n {MAX_FILES} && exec "$@"', "sh")
    flags = (*FLAGS, "--read-timeout", str(READ_TIMEOUT_S))
    with room_for_sockets(4 * NUM_CLIENTS):
        async with server_process(model, *flags, under=under) as server, AsyncExitStack() as stack:
            await server.until_ready()
            text, num_files = await text_of(server.url), files_of(server)
            for _ in range(NUM_CLIENTS):
                stack.push_async_callback((await Wire.connect(server.url)).close)
            began = seconds_of(server)
            await asyncio.sleep(1)
            assert seconds_of(server) - began < 0.5
            assert files_of(server) < MAX_FILES
            await served_within(server.url, READ_TIMEOUT_S * 4)
            await stack.aclose()
            assert await text_of(server.url) == text
            async with asyncio.timeout(5):
                while files_of(server) > num_files + 2:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)


async def test_a_hundred_clients_that_never_read_are_dropped_and_leave_nothing(model: Path) -> None:
    flags = (*FLAGS, "--stall-timeout", str(STALL_TIMEOUT_S), "--max-num-seqs", "128")
    body = {**BODY, "max_tokens": 250, "stream": True, "ignore_eos": True, "logprobs": 5}
    data = json.dumps(body).encode()
    with room_for_sockets(4 * NUM_CLIENTS):
        async with server_process(model, *flags, faults=SLOWLY) as server, AsyncExitStack() as stack:
            await server.until_ready()
            text, num_files = await text_of(server.url), files_of(server)
            memory = psutil.Process(server.process.pid).memory_info().rss
            for _ in range(NUM_READERS):
                wire = await stack.enter_async_context(narrow_wire(server.url))
                await wire.send("POST", PATH, data)
            began = time.monotonic()
            while "timeout" not in (page := await metrics(server)) or page["timeout"] < NUM_READERS:
                assert time.monotonic() - began < 60, page
                await asyncio.sleep(0.2)
            assert page["disconnect"] == 0
            assert await text_of(server.url) == text
            assert files_of(server) <= num_files + 2
            assert psutil.Process(server.process.pid).memory_info().rss - memory < 50 << 20


async def metrics(server: ServerProcess) -> dict[str, float]:
    """Aborted requests by reason."""
    page = (await ask(server.url, "GET", "/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith("slipstream_request_aborts_total{")]
    return {line.split('reason="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}
