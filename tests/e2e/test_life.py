"""The life of a real process: drains, signals, a hang, death; what clients read and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess, server_process
from tests.e2e.wire import RawReply, Wire, ask, events_of
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.timeout(300)  # a start imports all of torch and transformers

PATH = "/v1/completions"
FLAGS = ("--speculative-method", "none", "--kv-cache-memory", "64MiB")
SLOWLY = [{"point": "forward_sleep", "count": -1, "seconds": 0.05}]  # 20 tokens a second
EXIT_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("life") / "model")


HANG = [{"point": "forward_sleep", "at": 12, "seconds": 60}]
DEATH = [{"point": "forward_raise", "at": 30, "count": -1}]


@asynccontextmanager
async def ready(model: Path, *flags: str, faults: Any) -> AsyncIterator[ServerProcess]:
    """A server for one test."""
    async with server_process(model, *FLAGS, *flags, faults=faults) as server:
        await server.until_ready()
        yield server


def body_of(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "The quick", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


async def open_stream(url: str, max_tokens: int, **fields: Any) -> Wire:
    """A stream that has given its first chunk."""
    wire = await Wire.connect(url)
    await wire.send("POST", PATH, json.dumps(body_of(max_tokens, stream=True, **fields)).encode())
    status, _ = await wire.head()
    assert status == 200
    await wire.chunk()
    return wire


async def events_left(wire: Wire, timeout_s: float) -> list[Any]:
    """What a stream still gives, to its [DONE]."""
    events = events_of(b"".join(await asyncio.wait_for(wire.chunks(), timeout_s)))
    await wire.close()
    return events


async def code_of(url: str, path: str) -> tuple[int, str | None]:
    """Status and error code of a GET."""
    reply = await ask(url, "GET", path)
    return reply.status, reply.json()["error"]["code"] if reply.status != 200 else None


async def count_of(url: str, *words: str) -> float:
    """The value of the sample whose line has all these words."""
    page = (await ask(url, "GET", "/metrics")).body.decode()
    (line,) = [line for line in page.splitlines() if all(word in line for word in words)]
    return float(line.rsplit(" ", 1)[1])


def error_of(reply: RawReply) -> tuple[int, str]:
    return reply.status, reply.json()["error"]["code"]


def bind_again(url: str) -> None:
    """Listen where a server listened, without asking for the address to be reused."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        listener.listen()


async def test_sigterm_finishes_what_it_can_and_turns_the_rest_away(model: Path) -> None:
    async with ready(model, "--drain-timeout", "3", faults=SLOWLY) as server:
        url = server.url
        idle = await Wire.connect(url)
        await idle.send("GET", "/health")
        await idle.reply()
        short, long = await asyncio.gather(open_stream(url, 20), open_stream(url, 240))
        long_json = asyncio.create_task(ask(url, "POST", PATH, body_of(240)))
        unread = await open_stream(url, 240)
        children = server.children()
        began = time.monotonic()
        server.signal()
        await server.said("draining for up to 3 s")
        assert await code_of(url, "/health/ready") == (503, "draining")
        assert await code_of(url, "/health") == (200, None)
        for path in (PATH, "/v1/chat/completions"):
            fields = {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
            refused = await ask(url, "POST", path, fields)
            assert error_of(refused) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
        finished = await events_left(short, 10)
        assert finished[-1]["choices"][0]["finish_reason"] == "length"
        cut = await events_left(long, 10)
        assert cut[-1]["error"]["code"] == "draining"
        assert error_of(await asyncio.wait_for(long_json, 5)) == (503, "draining")
        assert await server.exit_code(EXIT_S) == 0
        assert time.monotonic() - began < 3 + 5
        bind_again(url)
        assert await asyncio.wait_for(idle.reader.read(), 1) == b""
        assert not [child for child in children if child.is_running()]
        assert not server.other_lines
        for wire in (idle, unread):
            await wire.close()


@pytest.mark.slow
async def test_a_hung_step_ends_every_stream_and_the_process(model: Path) -> None:
    flags = ("--watchdog-timeout", "2", "--max-num-seqs", "2")
    async with ready(model, *flags, faults=HANG) as server:
        url = server.url
        stream, other = await asyncio.gather(open_stream(url, 200), open_stream(url, 200))
        queued = asyncio.create_task(ask(url, "POST", PATH, body_of(5)))
        record = await server.said("a step hangs", 20)
        detected = time.monotonic()
        for wire in (stream, other):
            assert (await events_left(wire, 1))[-1]["error"]["code"] == "engine_hung"
        assert error_of(await asyncio.wait_for(queued, 1)) == (503, "engine_hung")
        assert await code_of(url, "/health") == (503, "engine_hung")
        assert await code_of(url, "/ready") == (503, "engine_hung")
        assert error_of(await ask(url, "POST", PATH, body_of(5))) == (503, "engine_hung")
        assert await count_of(url, "engine_errors_total{", 'stage="watchdog"') == 1
        assert await count_of(url, 'requests_total{finish_reason="error"') == 3
        assert time.monotonic() - detected < 3
        assert "no progress for 2" in record["event"] and "3 requests open" in record["event"]
        assert "thread target" in record["stack"] and "sleep" in record["stack"]
        assert record["num_seqs"] == 2
        assert await server.exit_code(EXIT_S) == 1
        bind_again(url)


@pytest.mark.slow
async def test_three_failed_passes_end_the_process(model: Path) -> None:
    async with ready(model, "--max-num-seqs", "1", faults=DEATH) as server:
        url = server.url
        stream = await open_stream(url, 200)
        others = [asyncio.create_task(ask(url, "POST", PATH, body_of(5))) for _ in range(5)]
        assert (await events_left(stream, 20))[-1]["error"]["code"] == "forward_failed"
        codes = sorted(error_of(reply) for reply in await asyncio.wait_for(asyncio.gather(*others), 5))
        assert codes == [(500, "forward_failed")] + 4 * [(503, "engine_dead")]
        assert await code_of(url, "/health") == (503, "engine_dead")
        assert await count_of(url, 'requests_total{finish_reason="error"') == 6
        server.signal()  # cuts its farewell short, and is no excuse
        assert await server.exit_code(EXIT_S) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
async def test_signals_while_it_loads(model: Path, number: signal.Signals, times: int) -> None:
    async with server_process(model, *FLAGS) as server:
        for _ in range(times):
            server.signal(number)
            await asyncio.sleep(0.05)
        assert await server.exit_code(5) in ((0,) if times == 1 else (0, 1))
        bind_again(server.url)
        assert not server.other_lines
