"""The load client against a real socket: what it notes, and what it refuses to call a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.bench.load_client import BurstFailed, EventSplitter, completion_request, run_burst

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value}])


GOOD = [text("a"), b": keep-alive\n\n", text("b"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_survive_any_cut(size: int) -> None:
    stream = b"".join(GOOD)
    splitter = EventSplitter()
    payloads = []
    for start in range(0, len(stream), size):
        payloads += splitter.feed(stream[start : start + size])
    assert len(payloads) == 4
    assert json.loads(payloads[0])["choices"][0]["text"] == "a"
    assert payloads[-1] == b"[DONE]"


def test_a_request_is_one_whole_http_message() -> None:
    head, _, content = completion_request("127.0.0.1", 80, {"prompt": "é"}).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert f"content-length: {len(content)}".encode() in head
    assert json.loads(content) == {
        "prompt": "é",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@asynccontextmanager
async def sse_server(chunks: list[bytes], status: str = "200 OK", gap_s: float = 0.0) -> AsyncIterator[int]:
    """Answers every request with `chunks`, each one chunk of a chunked body, and then says goodbye."""

    handlers: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await reply(reader, writer)
        finally:
            writer.transport.abort()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for chunk in chunks:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
            await asyncio.sleep(gap_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        server.close()
        await server.wait_closed()


async def test_a_burst_notes_each_event_with_text_and_the_servers_own_counts() -> None:
    async with sse_server(GOOD, gap_s=0.01) as port:
        records = await run_burst("127.0.0.1", port, [{"prompt": "x"}] * 3, timeout_s=10)
    assert len(records) == 3
    for record in records:
        assert len(record.event_times) == 2
        assert record.sent < record.event_times[0] < record.event_times[1]
        assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (3, 2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: good[:-1], "broke off after 3 events"),
        (lambda good: [], "broke off after 0 events"),
        (lambda good: [*good[:2], event(error={"message": "no"}), good[-1]], "ended with an error"),
        (lambda good: [good[0], good[-1]], "no usage"),
    ],
)
async def test_a_stream_cut_short_is_a_failure(
    change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    async with sse_server(change(GOOD)) as port:
        with pytest.raises(BurstFailed, match=message):
            await run_burst("127.0.0.1", port, [{}], timeout_s=10)


async def test_a_refusal_is_a_failure_that_shows_the_reply() -> None:
    async with sse_server([b'{"error": "queue full"}'], status="503 Service Unavailable") as port:
        with pytest.raises(BurstFailed, match=r"HTTP 503: .*queue full"):
            await run_burst("127.0.0.1", port, [{}], timeout_s=10)


async def test_a_burst_has_a_time_limit() -> None:
    async with sse_server(GOOD, gap_s=5.0) as port:
        with pytest.raises(BurstFailed, match="longer than"):
            await run_burst("127.0.0.1", port, [{}], timeout_s=0.05)


async def test_nobody_listening_is_a_failure() -> None:
    async with sse_server([]) as port:
        pass
    with pytest.raises(BurstFailed, match="no connection"):
        await run_burst("127.0.0.1", port, [{}], timeout_s=10)
