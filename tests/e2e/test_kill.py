"""Killed without a word, time and again under load: the next start on the same port serves the same texts."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.bench.processes import free_port
from tests.e2e.server_process import ServerProcess, server_process
from tests.e2e.test_life import FLAGS, PATH
from tests.e2e.wire import Wire, ask
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_KILLS = 20
NUM_STREAMS = 32
CANARIES: list[dict[str, Any]] = [
    {"prompt": "The quick brown fox", "max_tokens": 60, "temperature": 0},
    {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 1, "seed": 7, "n": 3},
]


async def sing(url: str) -> list[Any]:
    """What the canaries get."""
    replies = [await ask(url, "POST", PATH, {**canary, "return_token_ids": True}) for canary in CANARIES]
    return [[choice["token_ids"] for choice in reply.json()["choices"]] for reply in replies]


async def load(server: ServerProcess, seed: int) -> int:
    """Ask for streams until the connection breaks; how many chunks came."""
    num_chunks = 0
    body = {"prompt": f"{seed} Once upon a time", "max_tokens": 200, "stream": True, "seed": seed}
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            wire = await Wire.connect(server.url)
            try:
                await wire.send("POST", PATH, json.dumps(body).encode())
                await wire.head()
                while await wire.chunk():
                    num_chunks += 1
            finally:
                await wire.close()
    return num_chunks


async def test_each_restart_after_a_kill_serves_the_same(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    rng = random.Random(3)
    port = free_port()
    heard: list[list[Any]] = []
    num_chunks = 0
    for _ in range(NUM_KILLS + 1):
        async with server_process(model, *FLAGS, port=port) as server:
            await server.until_ready()
            heard.append(await sing(server.url))
            assert heard[-1] == heard[0]
            streams = [asyncio.create_task(load(server, seed)) for seed in range(NUM_STREAMS)]
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            server.signal(signal.SIGKILL)
            assert await server.exit_code(5) == -signal.SIGKILL
            num_chunks += sum(await asyncio.wait_for(asyncio.gather(*streams), 10))
            assert not server.children()
    assert num_chunks > NUM_STREAMS
