"""A client that leaves ends its requests, wherever they are."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.http_server import server_url
from tests.e2e.wire import Wire, ask
from tests.support.fake_engine import FakeEngine

PATH = "/v1/completions"


class Gates:
    """Blocks every token from the `block_from`-th on and says when one waits there."""

    def __init__(self, block_from: int) -> None:
        self.block_from = block_from
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, i: int) -> None:
        if i < self.block_from:
            await asyncio.sleep(0)
            return
        self.reached.set()
        await self.go.wait()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", [0, 2])
async def test_leaving_closes_every_stream(stream: bool, n: int, after: int) -> None:
    gates = Gates(after)
    engine = FakeEngine(gate=gates)
    async with server_url(engine) as url:
        wire = await Wire.connect(url)
        body = {"prompt": "abcdef", "n": n, "stream": stream, "max_tokens": 100}
        await wire.send("POST", PATH, json.dumps(body).encode())
        await asyncio.wait_for(gates.reached.wait(), 5)
        assert engine.num_open == n
        await wire.close()
        await asyncio.wait_for(asyncio.gather(*(each.closed.wait() for each in engine.streams)), 1)
        gates.go.set()
        page = (await ask(url, "GET", "/metrics")).body.decode()
    if not stream:
        assert f'{{code="499",model_name="test-model",route="{PATH}"}} 1.0' in page


async def test_leaving_while_the_prompt_is_read_submits_nothing() -> None:
    engine = FakeEngine()
    reached, gone = asyncio.Event(), asyncio.Event()

    async def encode(text: str, *, add_special_tokens: bool = True, tenant: str | None = None) -> list[int]:
        reached.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            gone.set()
        return [1]

    engine.encode = encode  # type: ignore[method-assign]
    async with server_url(engine) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", PATH, b'{"prompt":"abc"}')
        await asyncio.wait_for(reached.wait(), 5)
        await wire.close()
        await asyncio.wait_for(gone.wait(), 1)
    assert engine.requests == []


async def test_leaving_in_the_middle_of_a_body_is_no_error() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", PATH, b'{"prompt":', {"content-length": "100"})
        await asyncio.sleep(0)
        await wire.close()
        assert (await ask(url, "POST", PATH, {"prompt": "abc"})).status == 200
    assert len(engine.requests) == 1


async def test_a_connection_outlives_its_requests() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        wire = await Wire.connect(url)
        for stream in (False, True, False):
            body = {"prompt": "abc", "stream": stream, "max_tokens": 2}
            await wire.send("POST", PATH, json.dumps(body).encode())
            assert (await wire.reply()).status == 200
        await wire.close()
    assert not any(stream.closed.is_set() for stream in engine.streams)


@pytest.mark.parametrize("num_tokens", [5000, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_a_reader_that_lags_gets_all_of_it(num_tokens: int) -> None:
    async with server_url(FakeEngine(max_model_len=200_000)) as url:
        wire = await Wire.connect(url)
        body = {"prompt": "x" * 1000, "max_tokens": num_tokens, "stream": True, "temperature": 0}
        await wire.send("POST", PATH, json.dumps(body).encode())
        await wire.head()
        await asyncio.sleep(0.3)  # the socket's buffers fill, and the server has to wait for us
        size = 0
        while chunk := await wire.chunk():
            size += chunk.count(b'"text":"x"')
        await wire.close()
    assert size == num_tokens
