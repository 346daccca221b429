"""Bombs from several sides at once against a server in a process of its own; its health by the clock."""

from __future__ import annotations

import asyncio
import http.client
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.http_server import server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.server_process import server_process
from tests.e2e.wire import ask
from tests.security.test_bombs import COMPLETIONS, LISTS, OK, TEXTS, completion
from tests.support.loop_lag import percentile
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FOR_S = 20.0
NUM_SENDERS = 2
PROBE_S = 0.01
HEALTH_S = 0.1  # of 99 in 100 probes


async def test_health_answers_in_time_while_bombs_fall(tmp_path: Path) -> None:
    bombs = [(path, make()) for path, make, _ in (*TEXTS.values(), *LISTS.values())]
    model = save_tiny_model("llama", tmp_path / "model")
    async with server_process(model, "--kv-cache-memory", "16MiB") as server:
        await server.until_ready()
        ends = time.monotonic() + FOR_S
        statuses: list[int] = []

        async def throw(first: int) -> None:
            number = first
            while time.monotonic() < ends:
                path, body = bombs[number % len(bombs)]
                statuses.append((await ask(server.url, "POST", path, body)).status)
                number += NUM_SENDERS

        took: list[float] = []

        def probe() -> None:
            """In a thread: the senders keep their loop busy."""
            client = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]))
            while time.monotonic() < ends:
                started = time.monotonic()
                client.request("GET", "/health")
                reply = client.getresponse()
                assert reply.status == 200 and reply.read()
                took.append(time.monotonic() - started)
                time.sleep(PROBE_S)
            client.close()

        await asyncio.gather(asyncio.to_thread(probe), *map(throw, range(NUM_SENDERS)))
        assert (await ask(server.url, "POST", COMPLETIONS, OK)).status == 200
    assert len(statuses) > len(bombs)
    assert set(statuses) <= {200, 400}
    assert percentile(took, 99) < HEALTH_S, (len(took), len(statuses), percentile(took, 50), max(took))


async def test_ten_thousand_schemas_leave_no_more_memory_than_a_few(tmp_path: Path) -> None:
    async with real_engine(save_tiny_model("llama", tmp_path / "model")) as engine, server_url(engine) as url:

        async def ask_for(first: int, count: int) -> None:
            for number in range(first, first + count):
                schema = {"type": "object", "properties": {f"name{number}": {"const": number}}}
                body = completion(structured_outputs={"json": schema}, max_tokens=1)
                assert (await ask(url, "POST", COMPLETIONS, body)).status == 200

        await ask_for(0, 500)
        before = psutil.Process().memory_info().rss
        await ask_for(500, 9500)
        assert psutil.Process().memory_info().rss - before < 30 << 20
