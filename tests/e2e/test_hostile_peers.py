"""Whatever bytes a client sends, it gets a 4xx or is closed, and everyone else is served as before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from tests.e2e.http_server import server_url
from tests.e2e.raw_peer import HOST, JSON, completion, flood, read_all, request, say, statuses
from tests.e2e.wire import Wire, ask, events_of
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = b'{"prompt":"abc","max_tokens":3,"temperature":0}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
INNER = request(JSON + LENGTH, BODY)  # what a smuggler would have answered to somebody else
READ_TIMEOUT_S = 1.0


def post(headers: bytes, body: bytes = BODY) -> bytes:
    return request(JSON + headers, body)


def get(target: bytes, version: bytes = b"HTTP/1.1", headers: bytes = b"") -> bytes:
    return request(headers, start=b"GET " + target + b" " + version)


REFUSED = {
    # Two readings of where the body ends.
    "length and chunked": post(LENGTH + CHUNKED, CHUNK + INNER),
    "chunked and length": post(CHUNKED + LENGTH, CHUNK + INNER),
    "two equal lengths": post(LENGTH * 2),
    "two lengths": post(LENGTH + b"Content-Length: 0\r\n", BODY + INNER),
    "a list of lengths": post(b"Content-Length: 47, 47\r\n"),
    "negative length": post(b"Content-Length: -1\r\n"),
    "signed length": post(b"Content-Length: +47\r\n"),
    "hexadecimal length": post(b"Content-Length: 0x2f\r\n"),
    "empty length": post(b"Content-Length: \r\n"),
    "length in words": post(b"Content-Length: all\r\n"),
    "length over 64 bits": post(b"Content-Length: 99999999999999999999999\r\n"),
    "length of 64 bits": post(b"Content-Length: 18446744073709551615\r\n"),
    "length over the cap": post(b"Content-Length: 8388609\r\n"),
    "space before the colon": post(b"Content-Length : 47\r\n", BODY + INNER),
    "unknown coding": post(b"Transfer-Encoding: xchunked\r\n", CHUNK + INNER),
    "identity coding": post(b"Transfer-Encoding: identity\r\n", CHUNK + INNER),
    "chunked is not last": post(b"Transfer-Encoding: chunked, identity\r\n", CHUNK + INNER),
    "chunked twice": post(CHUNKED * 2, CHUNK + INNER),
    "chunked with a vertical tab": post(b"Transfer-Encoding: \x0bchunked\r\n", CHUNK + INNER),
    "chunked in HTTP/1.0": request(JSON + CHUNKED, CHUNK, b"POST /v1/completions HTTP/1.0"),
    # Chunks.
    "chunk size in words": post(CHUNKED, b"zz\r\nabc\r\n0\r\n\r\n"),
    "negative chunk": post(CHUNKED, b"-1\r\nabc\r\n0\r\n\r\n"),
    "prefixed chunk size": post(CHUNKED, b"0x3\r\nabc\r\n0\r\n\r\n"),
    "huge chunk size": post(CHUNKED, b"ffffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
    "chunk longer than said": post(CHUNKED, b"3\r\nabcd\r\n0\r\n\r\n"),
    "chunk ended by a line feed": post(CHUNKED, b"3\nabc\n0\n\n"),
    "extension ended by a line feed": post(CHUNKED, b"3;a=b\nabc\r\n0\r\n\r\n" + INNER),
    "space after the chunk size": post(CHUNKED, b"3 \r\nabc\r\n0\r\n\r\n"),
    # Lines.
    "folded header": post(b"X-A: a\r\n b\r\n" + LENGTH),
    "bare line feeds": get(b"/health").replace(b"\r\n", b"\n"),
    "one bare line feed": get(b"/health", headers=b"X-A: a\nX-B: b\r\n"),
    "bare carriage return": get(b"/health", headers=b"X-A: a\rX-B: b\r\n"),
    "header without a colon": get(b"/health", headers=b"X-A\r\n"),
    "header without a name": get(b"/health", headers=b": a\r\n"),
    "space before the first header": b"GET /health HTTP/1.1\r\n Host: test\r\n\r\n",
    "two hosts": get(b"/health", headers=b"Host: other\r\n"),
    "NUL in a value": get(b"/health", headers=b"X-A: a\0b\r\n"),
    "NUL in a name": get(b"/health", headers=b"X\0: a\r\n"),
    "non-ASCII in a name": get(b"/health", headers=b"X-\xc3\xa9: a\r\n"),
    # First lines.
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "HTTP/0.9 by its number": get(b"/health", b"HTTP/0.9"),
    "HTTP/1.2": get(b"/health", b"HTTP/1.2"),
    "HTTP/2.0": get(b"/health", b"HTTP/2.0"),
    "HTTP/9.9": get(b"/health", b"HTTP/9.9"),
    "another protocol": b"SSH-2.0-OpenSSH_9.9\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "NUL in the path": get(b"/health\0"),
    "non-ASCII in the path": get(b"/health\xc3\xa9"),
    "path without a slash": get(b"health"),
    "no path": get(b"http://test"),
    "tabs for spaces": b"GET\t/health\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "method in lower case": b"get /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "unknown method": b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT other:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT with a path": b"CONNECT /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT and what it would be for": b"CONNECT other:443 HTTP/1.1\r\n" + HOST + b"\r\n" + INNER,
    "CONNECT with an upgrade": b"CONNECT other:443 HTTP/1.1\r\nUpgrade: h2c\r\n" + HOST + b"\r\n",
    "CONNECT with a body": b"CONNECT other:443 HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY,
}

ODD = {
    "chunk extension": (post(CHUNKED, b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)), 200),
    "trailer": (post(CHUNKED, CHUNK[:-2] + b"X-A: b\r\n\r\n"), 200),
    "chunks of one byte": (post(CHUNKED, b"".join(b"1\r\n%c\r\n" % c for c in BODY) + b"0\r\n\r\n"), 200),
    "blank lines first": (b"\r\n\r\n" + post(LENGTH), 200),
    "HTTP/1.0": (request(JSON + LENGTH, BODY, b"POST /v1/completions HTTP/1.0"), 200),
    "whole address": (get(b"http://other/health"), 200),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 200),
    "bytes over ASCII in a value": (get(b"/health", headers=b"X-A: \xff\xfe\r\n"), 200),
    "upgrade to HTTP/2": (post(b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH), 200),
    "upgrade to HTTP/2, in chunks": (post(b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + CHUNKED, CHUNK), 200),
    "web socket": (get(b"/health", headers=b"Connection: Upgrade\r\nUpgrade: websocket\r\n"), 200),
    "NUL escaped in the path": (get(b"/%00health"), 404),
    "line feed escaped in the path": (get(b"/health%0d%0aX-A:%20b"), 404),
    "broken escapes in the path": (get(b"/%ff%zz%"), 404),
    "HEAD": (request(start=b"HEAD /v1/completions HTTP/1.1"), 405),
    "OPTIONS": (request(start=b"OPTIONS /v1/completions HTTP/1.1"), 405),
    "OPTIONS of everything": (request(start=b"OPTIONS * HTTP/1.1"), 404),
    "TRACE": (request(start=b"TRACE /health HTTP/1.1"), 405),
    "compressed chunks": (post(b"Transfer-Encoding: gzip, chunked\r\n", b"2\r\n\x1f\x8b\r\n0\r\n\r\n"), 400),
    "ten thousand times nested": (post(b"Content-Length: 10000\r\n", b"[" * 10_000), 400),
}

FLOODS = {
    "one header of 1 MiB": (b"GET /health HTTP/1.1\r\nX-A: ", b"a", b"\r\n\r\n"),
    "20 000 headers": (b"GET /health HTTP/1.1\r\n", b"a: b\r\n", b"\r\n"),
    "20 000 hosts": (b"GET /health HTTP/1.1\r\n", b"Host:b\r\n", b"\r\n"),
    "a name of 1 MiB": (b"GET /health HTTP/1.1\r\n", b"a", b": b\r\n\r\n"),
    "a path of 1 MiB": (b"GET /", b"a", b" HTTP/1.1\r\n\r\n"),
    "a query of 1 MiB": (b"GET /health?", b"a", b" HTTP/1.1\r\n\r\n"),
    "blank lines": (b"", b"\r\n", b""),
    "a chunk extension of 1 MiB": (post(CHUNKED, b"3;a="), b"a", b"\r\n"),
    "a trailer of 1 MiB": (post(CHUNKED, CHUNK[:-2] + b"X-A: "), b"a", b"\r\n\r\n"),
    "20 000 trailers": (post(CHUNKED, CHUNK[:-2]), b"a: b\r\n", b"\r\n"),
    "a body without end": (post(CHUNKED, b"f000000\r\n"), b"a", b""),
    "requests sent ahead": (completion(), completion(), b""),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[tuple[str, FakeEngine]]:
    engine = FakeEngine()
    async with server_url(engine, read_timeout=READ_TIMEOUT_S, max_body_bytes=100_000) as url:
        yield url, engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(server: tuple[str, FakeEngine]) -> FakeEngine:
    _, engine = server
    engine.requests.clear()
    return engine


@pytest_asyncio.fixture(loop_scope="module")
async def url(server: tuple[str, FakeEngine]) -> AsyncIterator[str]:
    url, _ = server
    yield url
    assert (await ask(url, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def error_of(received: bytes) -> dict[str, str]:
    """The error of the last reply, which must be complete and the connection's last."""
    head, _, body = received.rpartition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"x-request-id: req-" in head
    error: dict[str, str] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize("case", REFUSED)
async def test_what_can_be_read_in_two_ways_or_in_none_is_4xx_and_the_end(
    url: str, engine: FakeEngine, case: str
) -> None:
    received = await say(url, REFUSED[case])
    assert [status // 100 for status in statuses(received)] == [4]
    assert error_of(received)["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize("case", REFUSED)
async def test_the_same_byte_by_byte(url: str, engine: FakeEngine, case: str) -> None:
    data = REFUSED[case]
    wire = await Wire.connect(url)
    for byte in data:
        wire.writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        received = await read_all(wire)
    await wire.close()
    assert [status // 100 for status in statuses(received)] == [4]
    assert engine.requests == []


@pytest.mark.parametrize("case", ODD)
async def test_what_is_odd_but_clear_is_answered_once(url: str, case: str) -> None:
    data, status = ODD[case]
    wire = await Wire.connect(url)
    wire.writer.write(data)
    async with asyncio.timeout(10):
        assert (await wire.head())[0] == status
    await wire.close()


@pytest.mark.parametrize("case", FLOODS)
async def test_a_flood_ends_in_4xx_and_leaves_no_memory_behind(url: str, case: str) -> None:
    start, piece, end = FLOODS[case]
    await say(url, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    before = memory()
    received = await say(url, start, *flood(piece, 1 << 20), end)
    assert memory() - before < 10 << 20
    # Whoever is cut off while it sends may miss the reply, but never gets another one.
    assert [status // 100 for status in statuses(received) if status != 200] in ([4], [])
    assert len(statuses(received)) <= 18


async def test_an_unfinished_head_over_the_cap_is_431_at_once(url: str) -> None:
    received = await say(url, b"GET /health HTTP/1.1\r\nX-A: ", b"a" * 70_000, within_s=READ_TIMEOUT_S * 5)
    assert statuses(received) == [431]
    assert error_of(received)["code"] == "headers_too_large"


async def test_a_trailer_is_no_header() -> None:
    async with server_url(FakeEngine(), api_key=("secret",)) as url:
        trailer = b"Authorization: Bearer secret\r\n\r\n"
        received = await say(url, post(CHUNKED + b"Connection: close\r\n", CHUNK[:-2] + trailer))
    assert statuses(received) == [401]


async def test_requests_sent_ahead_are_answered_in_order(url: str, engine: FakeEngine) -> None:
    bodies = [b'{"prompt":"%c","max_tokens":1,"stream":%s}' % (c, b"true") for c in b"abcde"]
    wire = await Wire.connect(url)
    wire.writer.write(b"".join(completion(body) for body in bodies))
    texts = []
    for _ in bodies:
        events = (await wire.reply()).body.split(b"\n\n")
        texts.append(json.loads(events[0].removeprefix(b"data: "))["choices"][0]["text"])
    await wire.close()
    assert texts == list("abcde")


async def test_nonsense_after_a_request_leaves_its_reply_whole(url: str) -> None:
    body = b'{"prompt":"abc","max_tokens":9,"stream":true,"temperature":0}'
    received = await say(url, completion(body) + b"\0nonsense\r\n\r\n" + INNER)
    assert statuses(received) == [200]
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_client_that_leaves_with_requests_sent_ahead_ends_the_one_that_runs() -> None:
    waiting, go = asyncio.Event(), asyncio.Event()

    async def gate(_: int) -> None:
        waiting.set()
        await go.wait()

    engine = FakeEngine(gate=gate)
    async with server_url(engine) as url:
        wire = await Wire.connect(url)
        wire.writer.write(completion())
        await asyncio.wait_for(waiting.wait(), 5)
        wire.writer.write(completion() * 3)
        await wire.writer.drain()
        await wire.close()
        await asyncio.wait_for(engine.streams[0].closed.wait(), 5)
    assert len(engine.requests) == 1


async def test_a_body_is_asked_for_only_when_it_would_be_read(url: str) -> None:
    expect = b"Expect: 100-continue\r\nConnection: close\r\n"
    wire = await Wire.connect(url)
    wire.writer.write(post(LENGTH + expect, b""))
    assert await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.writer.write(BODY)
    assert (await wire.reply()).status == 200
    await wire.close()
    received = await say(url, post(b"Content-Length: 999999\r\n" + expect, b""))
    assert received.startswith(b"HTTP/1.1 413 ")


async def test_a_refused_body_that_is_still_being_sent_lets_its_sender_read_why(url: str) -> None:
    size = 4_000_000
    received = await say(url, post(b"Content-Length: %d\r\n" % size, b""), *flood(b"a", size))
    assert statuses(received) == [413]
    assert error_of(received)["code"] == "body_too_large"


async def test_every_request_is_counted_once(url: str) -> None:
    async def count() -> float:
        page = (await ask(url, "GET", "/metrics")).body.decode()
        lines = [line for line in page.splitlines() if line.startswith("slipstream_http_requests_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = await count()
    sent = [*REFUSED.values(), *(completion() for _ in range(20))]
    closing = [data.replace(HOST, HOST + b"Connection: close\r\n", 1) for data in sent]
    received = await asyncio.gather(*(say(url, data) for data in closing))
    assert [len(statuses(each)) for each in received] == [1] * len(sent)
    assert await count() - before == len(sent) + 1


KEYLESS = {
    "empty host": get(b"/v1/models").replace(b"test", b""),
    "no host at all": b"GET /v1/models HTTP/1.1\r\n\r\n",
    **{
        f"target {target!r}": get(target)
        for target in (
            *(b"/health/../v1/models", b"/v1/models?/health", b"//v1/models", b"/v1//models", b"/V1/models"),
            *(
                b"/%76%31/models",
                b"/v1%2fmodels",
                b"/v1/models/",
                b"/health/%2e%2e/v1/models",
                b"/./v1/models",
            ),
            *(b"http://x/health/../v1/models", b"http://health/v1/models", b"http://x/v1/models#/health"),
            *(b"/health;/v1/models", b"/v1/models;/health", b"/health%00/../v1/models", b"/healthz"),
        )
    },
}


@pytest.mark.parametrize("case", KEYLESS)
async def test_no_spelling_of_a_path_or_host_does_without_the_key(locked: str, case: str) -> None:
    received = await say(locked, KEYLESS[case].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert statuses(received) in ([401], [400])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def locked() -> AsyncIterator[str]:
    async with server_url(FakeEngine(), api_key=("secret",)) as url:
        yield url


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
async def test_a_stream_has_no_chunks_for_who_does_not_know_them(url: str, expect: bytes) -> None:
    body = b'{"prompt":"abc","max_tokens":3,"temperature":0,"stream":true}'
    headers = JSON + b"Content-Length: %d\r\n" % len(body) + expect
    head, _, rest = (await say(url, request(headers, body, b"POST /v1/completions HTTP/1.0"))).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert "".join(event["choices"][0]["text"] for event in events_of(rest)) == "abc"
