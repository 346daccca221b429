"""Clients that send slowly, read slowly, or do neither: each is let go in time and keeps nobody waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest

from engine.loop.engine_parts import EngineLimits
from server.http.connection_gate import LOBBY
from tests.e2e.http_server import server_url
from tests.e2e.raw_peer import completion, narrow_wire, read_all, request, say, statuses
from tests.e2e.wire import RawReply, Wire, ask
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_engine import FakeEngine
from tests.support.sse_reader import room_for_sockets

PATH = "/v1/completions"
SHORT_S, LONG_S = 0.2, 30.0
NUM_MIXED = 180
LENGTH_100 = b"Content-Type: application/json\r\nContent-Length: 100\r\n"


async def until(is_so: Callable[[], bool]) -> None:
    """Return once it is so; TimeoutError if it never is."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - the server's side of a socket tells nobody here
            await asyncio.sleep(0.01)


async def drip(url: str, start: bytes, drop: bytes) -> tuple[bytes, float]:
    """Send `start`, then a drop again and again; what came back until the end, and after how long."""
    wire, began = await Wire.connect(url), time.monotonic()
    wire.writer.write(start)
    reading = asyncio.create_task(read_all(wire))
    with suppress(ConnectionError):
        while not reading.done():
            wire.writer.write(drop)
            await asyncio.wait({reading}, timeout=SHORT_S / 10)
    took_s = time.monotonic() - began
    received = await reading
    await wire.close()
    return received, took_s


SLOW_SENDERS = {
    "silence": (b"", b"", []),
    "blank lines": (b"", b"\r\n", []),
    "half a first line": (b"GET /hea", b"", [408]),
    "a header without end": (b"GET /health HTTP/1.1\r\nX-A: ", b"a", [408]),
    "headers without end": (b"GET /health HTTP/1.1\r\n", b"a: b\r\n", [408]),
    "HTTP/0.9": (b"GET /health\r\n", b"", [408]),
    "no body": (request(LENGTH_100), b"", [408]),
    "a slow body": (request(LENGTH_100), b"a", [408]),
    "a slow chunked body": (request(b"Transfer-Encoding: chunked\r\n"), b"1\r\n \r\n", [415]),
    "silence after a reply": (b"GET /health HTTP/1.1\r\n\r\n", b"\r\n", [200]),
    "half a request after a reply": (b"GET /health HTTP/1.1\r\n\r\nGET /hea", b"", [200, 408]),
    "half a request behind another": (completion() + b"GET /hea", b"l", [200, 408]),
}


@pytest.mark.parametrize("case", SLOW_SENDERS)
async def test_a_request_that_does_not_arrive_ends_in_its_time(case: str) -> None:
    start, drop, expected = SLOW_SENDERS[case]
    async with server_url(FakeEngine(), read_timeout=SHORT_S) as url:
        received, took_s = await asyncio.wait_for(drip(url, start, drop), 10)
        assert (await ask(url, "GET", "/health")).status == 200
    assert statuses(received) == expected
    assert took_s > SHORT_S * 0.9 or expected == [415]
    if expected[-1:] == [408]:
        error = json.loads(received.rpartition(b"\r\n\r\n")[2])["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "read_timeout")
        assert str(SHORT_S) in error["message"]


async def test_two_hundred_slow_senders_keep_nobody_waiting() -> None:
    async with server_url(FakeEngine(), read_timeout=SHORT_S * 3) as url:
        dripping = [asyncio.create_task(drip(url, request(LENGTH_100), b"a")) for _ in range(200)]
        while not all(each.done() for each in dripping):
            reply = await asyncio.wait_for(ask(url, "POST", PATH, {"prompt": "a", "max_tokens": 1}), 5)
            assert reply.status == 200
        received = [(await each)[0] for each in dripping]
    assert [statuses(each) for each in received] == [[408]] * 200


async def test_a_reply_may_take_longer_than_its_request() -> None:
    async def gate(_: int) -> None:
        await asyncio.sleep(SHORT_S * 2)

    async with server_url(FakeEngine(gate=gate), read_timeout=SHORT_S, stall_timeout=SHORT_S) as url:
        for stream in (False, True):
            reply = await ask(url, "POST", PATH, {"prompt": "a", "max_tokens": 1, "stream": stream})
            assert reply.status == 200


# Clients that do not read.


@pytest.fixture
async def chatty() -> AsyncIterator[FakeEngine]:
    """An engine that says a great deal, and goes on until somebody stops it."""
    yield FakeEngine(max_model_len=10**9, merge=50)


def endless(**fields: object) -> bytes:
    body = {"prompt": "x" * 1000, "max_tokens": 10**8, "stream": True, "temperature": 0, **fields}
    return completion(json.dumps(body).encode())


@pytest.mark.parametrize("n", [1, 3])
async def test_an_unread_stream_is_aborted_for_its_time_is_over(chatty: FakeEngine, n: int) -> None:
    async with server_url(chatty, stall_timeout=SHORT_S) as url, narrow_wire(url) as wire:
        wire.writer.write(endless(n=n))
        await wire.head()
        await until(lambda: bool(chatty.streams))
        await asyncio.wait_for(asyncio.gather(*(each.closed.wait() for each in chatty.streams)), 10)
        assert chatty.cancelled == [(each.request_id, "timeout") for each in chatty.streams]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(wire.chunks(), 10)
        assert (await ask(url, "GET", "/health")).status == 200


async def test_a_stall_counts_as_a_timeout_and_frees_the_blocks() -> None:
    shape = EngineShape(num_blocks=8192, max_model_len=32_000)
    async with (
        running_engine(shape) as harness,
        server_url(harness.engine, stall_timeout=SHORT_S) as url,
        narrow_wire(url) as wire,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 20_000, "stream": True, "ignore_eos": True}
        wire.writer.write(completion(json.dumps(body).encode()))
        await wire.head()
        aborts = harness.engine.metrics.request_aborts
        await until(lambda: aborts["timeout"] == 1)
        assert aborts["disconnect"] == 0
        page = (await ask(url, "GET", "/metrics")).body.decode()
    assert 'slipstream_request_aborts_total{model_name="test-model",reason="timeout"} 1.0' in page
    assert 'slipstream_requests_total{finish_reason="abort",model_name="test-model"} 1.0' in page


@pytest.mark.parametrize(("connection", "size"), [(b"close", 1_000_000), (b"keep-alive", 40_000)])
async def test_a_reply_that_is_never_read_is_dropped_with_its_socket(connection: bytes, size: int) -> None:
    engine = FakeEngine(max_model_len=10**7, merge=size)
    body = json.dumps({"prompt": "x" * 1000, "max_tokens": size, "temperature": 0}).encode()
    headers = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    async with server_url(engine, stall_timeout=SHORT_S) as url, narrow_wire(url) as wire:
        wire.writer.write(request(headers + b"Connection: " + connection + b"\r\n", body))
        _, found = await wire.head()
        await asyncio.sleep(SHORT_S * 3)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(wire.reader.readexactly(int(found["content-length"])), 10)


async def test_a_slow_reader_is_no_stalled_one(chatty: FakeEngine) -> None:
    async with server_url(chatty, stall_timeout=SHORT_S) as url, narrow_wire(url) as wire:
        wire.writer.write(endless())
        began = time.monotonic()
        while time.monotonic() - began < SHORT_S * 5:  # it takes little, and often
            assert await wire.reader.read(20_000)
            await asyncio.sleep(SHORT_S / 10)
        assert not chatty.streams[0].closed.is_set()


# Too many of them.


async def refused(ask_once: Awaitable[RawReply]) -> None:
    reply = await ask_once
    assert (reply.status, reply.json()["error"]["code"]) == (503, "too_many_connections")
    assert reply.headers["connection"] == "close"
    assert int(reply.headers["retry-after"]) >= 1


async def test_over_the_cap_a_client_is_told_so_and_health_still_answers() -> None:
    async with server_url(FakeEngine(), max_connections=2) as url:
        idle = [await Wire.connect(url) for _ in range(2)]
        for wire in idle:
            await wire.send("GET", "/version")
            assert (await wire.reply()).status == 200
        await refused(ask(url, "POST", PATH, {"prompt": "abc", "max_tokens": 1}))
        await refused(ask(url, "GET", "/v1/models"))
        for path in ("/health", "/ready", "/metrics"):
            reply = await ask(url, "GET", path)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        await idle[0].send("POST", PATH, b'{"prompt":"abc","max_tokens":1}')
        assert (await idle[0].reply()).status == 200
        await idle[0].close()
        async with asyncio.timeout(5):
            while (await ask(url, "GET", "/v1/models")).status != 200:
                pass
        await idle[1].close()


async def test_far_over_the_cap_a_client_is_closed_and_the_lobby_empties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.http.connection.LOBBY_S", SHORT_S)
    async with server_url(FakeEngine(), max_connections=4) as url, AsyncExitStack() as stack:
        silent = [await Wire.connect(url) for _ in range(4 + LOBBY + 20)]
        for wire in silent:
            stack.push_async_callback(wire.close)
        for wire in silent[4 + LOBBY :]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(wire.reader.read(), 5) == b""
        for wire in silent[4 : 4 + LOBBY]:
            assert await asyncio.wait_for(wire.reader.read(), 5) == b""
        await refused(ask(url, "GET", "/v1/models"))
        await silent[0].send("GET", "/v1/models")
        assert (await silent[0].reply()).status == 200


async def test_a_thousand_idle_connections_and_fifty_streams() -> None:
    engine = FakeEngine()
    async with AsyncExitStack() as stack:
        stack.enter_context(room_for_sockets(4000))
        url = await stack.enter_async_context(server_url(engine, read_timeout=LONG_S))
        for _ in range(20):
            some = await asyncio.gather(*(Wire.connect(url) for _ in range(50)))
            for wire in some:
                stack.push_async_callback(wire.close)
        body = {"prompt": "abcdef", "max_tokens": 50, "stream": True}
        replies = await asyncio.gather(*(ask(url, "POST", PATH, body) for _ in range(50)))
        assert [reply.status for reply in replies] == [200] * 50
        assert all(reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)


async def test_whatever_is_sent_is_answered_refused_or_given_up_and_counted() -> None:
    async def outcome(number: int) -> str:
        wire = await Wire.connect(url)
        try:
            body = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "stream": number % 2 == 0}
            await wire.send("POST", PATH, b"nonsense" if number % 7 == 0 else json.dumps(body).encode())
            if number % 5 == 0:
                await asyncio.sleep(0.02)
                return "left"
            return str((await wire.reply()).status)
        finally:
            await wire.close()

    limits = EngineLimits(max_queued_requests=16)
    async with (
        running_engine(limits=limits) as harness,
        server_url(harness.engine, max_connections=150) as url,
    ):
        found = Counter(await asyncio.gather(*(outcome(number) for number in range(NUM_MIXED))))
        metrics = harness.engine.metrics
        await until(lambda: metrics.requests_started == sum(metrics.requests_finished.values()))
    assert set(found) == {"200", "400", "503", "left"}
    assert sum(found.values()) == NUM_MIXED


async def test_the_end_of_a_keep_alive_client_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    async with server_url(FakeEngine()) as url:
        assert statuses(await say(url, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")) == [200]
        await say(url, b"nonsense\r\n\r\n")
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
