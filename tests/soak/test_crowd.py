"""How long an ordinary request waits beside 256 hostile ones of another tenant. Part of `make chaos`.

The crowd is a process of its own that gives way to the others, but has the same cores. So the wait alone is
also measured while the same crowd is refused by another server, and the longer of the two is what counts as
alone; both are told. Each ordinary request is one small streamed completion, and what counts is the time to
its first event.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.e2e.server_process import server_process
from tests.soak.hostile_bodies import CONTEXT
from tests.soak.hostile_crowd import KINDS, NUM_CLIENTS
from tests.support.tiny_models import save_tiny_model, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

BAR = 3.0  # times the wait alone
NUM_ASKED = 25
PAUSE_S = 0.1
WARM_UP_S = 4.0
ORDINARY, HOSTILE = "sk-ordinary", "sk-hostile"


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds to the first event: of half of the requests, and of nine in ten, no more."""

    median_s: float
    ninth_s: float

    def __str__(self) -> str:
        return f"{1e3 * self.median_s:7.1f} ms (nine in ten within {1e3 * self.ninth_s:7.1f} ms)"


def ordinary_waits(port: int, num_asked: int = NUM_ASKED) -> Waits:
    """Of requests one after another. Blocks."""
    body = json.dumps({"prompt": "Tell me of the sea", "max_tokens": 4, "stream": True})
    headers = {"content-type": "application/json", "authorization": f"Bearer {ORDINARY}"}
    waits = []
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as client:
        for _ in range(num_asked):
            began = time.monotonic()
            client.request("POST", "/v1/completions", body, headers)
            reply = client.getresponse()
            assert reply.status == 200, reply.read()
            assert reply.readline().startswith(b"data: ")
            waits.append(time.monotonic() - began)
            reply.read()
            time.sleep(PAUSE_S)
    waits.sort()
    return Waits(waits[num_asked // 2], waits[num_asked * 9 // 10])


@contextmanager
def hostile_crowd(url: str, kind: str, num_clients: int = NUM_CLIENTS) -> Iterator[dict[str, int]]:
    """The crowd at its work; what is given holds its replies by status once it has ended. Blocks."""
    command = (sys.executable, "-m", "tests.soak.hostile_crowd", url, HOSTILE, kind, str(num_clients))
    statuses: dict[str, int] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout is not None and crowd.stdout.readline() == b"begun\n"
        try:
            yield statuses
        finally:
            told, _ = crowd.communicate()
            statuses |= json.loads(told)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Limits as they are by default, and two tenants."""
    model = save_tiny_model("llama", tmp_path_factory.mktemp("crowd") / "model")
    tiny_model("llama", max_position_embeddings=CONTEXT).save_pretrained(model)
    keys = ("--api-key", ORDINARY, "--api-key", HOSTILE)
    async with server_process(model, "--kv-cache-memory", "32MiB", *keys) as server:
        await server.until_ready()
        yield server.url


@pytest.fixture(scope="module")
def refusing_url() -> Iterator[str]:
    """A server that does nothing but refuse."""
    command = (sys.executable, "-m", "tests.soak.refusing_server")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_ordinary_request_hardly_notices_a_hostile_crowd(
    url: str, refusing_url: str, kind: str
) -> None:
    port = int(url.rpartition(":")[2])

    def beside(crowd_url: str) -> tuple[Waits, dict[str, int]]:
        with hostile_crowd(crowd_url, kind) as statuses:
            time.sleep(WARM_UP_S)
            waits = ordinary_waits(port)
        return waits, statuses

    alone = await asyncio.to_thread(ordinary_waits, port)
    control, _ = await asyncio.to_thread(beside, refusing_url)
    waits, statuses = await asyncio.to_thread(beside, url)
    ratios = [f"{waits.median_s / each.median_s:.1f}" for each in (alone, control)]
    print(f"\n{kind}: alone {alone}, while the crowd is refused elsewhere {control}, beside it {waits}")
    print(f"{ratios[0]} times alone, {ratios[1]} times the control; its replies by status: {statuses}")
    assert waits.median_s <= BAR * max(alone.median_s, control.median_s)
