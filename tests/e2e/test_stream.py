"""Server-sent events to the byte, and what happens while nothing flows or something breaks."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from engine import EngineDead, EngineError, Overloaded, RequestFailed
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import Wire, ask, events_of
from tests.support.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "é🦀"}]
COMMENT = b": keep-alive\n\n"
LINES = {"type": "object", "properties": {"lines": {"type": "array"}}, "required": ["lines"]}
WRITE = {"name": "write", "parameters": LINES}


def neutral(chunk: bytes) -> bytes:
    """A chunk without what differs from run to run."""
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb"chatcmpl-\w+", b"ID", chunk))


async def test_a_chat_stream_is_this_to_the_byte() -> None:
    body = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with server_url(FakeEngine(merge=4), per_request_metrics=False) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", CHAT, json.dumps(body).encode())
        status, headers = await wire.head()
        chunks = await wire.chunks()
        await wire.close()
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
    head = b'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"test-model","choices":['
    usage = (
        b'"usage":{"prompt_tokens":8,"completion_tokens":8,"total_tokens":16,'
        b'"prompt_tokens_details":{"cached_tokens":2}}'
    )
    assert [neutral(chunk) for chunk in chunks] == [
        head + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        b'"usage":null}\n\n',
        head
        + b'{"index":0,"delta":{"content":"<use"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n',
        head + b'{"index":0,"delta":{"content":"r>\\u00e9\\ud83e\\udd80"},"logprobs":null,'
        b'"finish_reason":null}],"usage":null}\n\n',
        head + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}],'
        b'"usage":null}\n\n',
        head + b"]," + usage + b"}\n\n",
        b"data: [DONE]\n\n",
    ]


async def test_usage_comes_only_when_asked_for() -> None:
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "temperature": 0}
    async with server_url(FakeEngine()) as url:
        plain = events_of((await ask(url, "POST", COMPLETIONS, body)).body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        full = events_of((await ask(url, "POST", COMPLETIONS, {**body, "stream_options": options})).body)
        options = {"include_usage": True}
        last_only = events_of((await ask(url, "POST", COMPLETIONS, {**body, "stream_options": options})).body)
    assert not any("usage" in event for event in plain)
    assert [event["usage"]["completion_tokens"] for event in full] == [1, 2, 3, 3]
    assert [event["usage"] for event in last_only[:-1]] == [None] * 3
    assert last_only[-1]["choices"] == []
    assert last_only[-1]["usage"]["total_tokens"] == 6
    assert last_only[-1]["metrics"]["queue_time_ms"] == 1.0


async def test_streamed_text_joins_to_the_json_text() -> None:
    for merge in (1, 3, 100):
        async with server_url(FakeEngine(merge=merge)) as url:
            body = {"prompt": "日本 é 🦀\u2028", "max_tokens": 20, "seed": 7}
            whole = (await ask(url, "POST", COMPLETIONS, body)).json()["choices"][0]["text"]
            events = events_of((await ask(url, "POST", COMPLETIONS, {**body, "stream": True})).body)
        assert "".join(event["choices"][0]["text"] for event in events) == whole


async def test_each_event_is_one_write_and_ascii() -> None:
    body = {"prompt": "日本", "max_tokens": 6, "stream": True}
    async with server_url(FakeEngine()) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", COMPLETIONS, json.dumps(body).encode())
        await wire.head()
        chunks = await wire.chunks()
        await wire.close()
    for chunk in chunks:
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
        assert chunk.count(b"\n") == 2
        assert b"\r" not in chunk
        assert chunk.isascii()


async def test_comments_flow_while_nothing_else_does() -> None:
    go = asyncio.Event()

    async def gate(_: int) -> None:
        await go.wait()

    async with server_url(FakeEngine(gate=gate), sse_keepalive_seconds=0.02) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", COMPLETIONS, b'{"prompt":"ab","max_tokens":2,"stream":true,"temperature":0}')
        assert (await wire.head())[0] == 200
        assert [await wire.chunk() for _ in range(3)] == [b": keep-alive\n\n"] * 3
        go.set()
        events = events_of(b"".join(await wire.chunks()))
        await wire.close()
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        (
            "/v1/chat/completions",
            {"messages": HELLO, "tools": [{"type": "function", "function": WRITE}]},
            COMMENT,
        ),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **WRITE}]}, COMMENT),
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 300, "tools": [{"name": "write", "input_schema": LINES}]},
            b"event: ping\n",
        ),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_comments_flow_while_tokens_come_that_show_nothing_yet(
    path: str, body: dict[str, Any], sign: bytes
) -> None:
    """As those of a long list do, where the format tells it when it has ended."""

    async def gate(_: int) -> None:
        await asyncio.sleep(0.001)

    call = '<tool_call><function=write><parameter=lines>\n["{}"]\n</parameter></function></tool_call>'
    engine = FakeEngine(
        tool_template="{{ tools }}<function=x><parameter=y>",
        reply=call.format("x" * 100),
        gate=gate,
        max_model_len=4096,
    )
    async with server_url(engine, sse_keepalive_seconds=0.02) as url:
        reply = await ask(url, "POST", path, {**body, "stream": True})
    before, argument, _ = reply.body.partition(b"xxx")
    assert argument and before.count(sign) > 1


async def test_comments_flow_beside_several_choices() -> None:
    go = asyncio.Event()

    async def gate(i: int) -> None:
        await (go.wait() if i else asyncio.sleep(0))

    async with server_url(FakeEngine(gate=gate), sse_keepalive_seconds=0.02) as url:
        wire = await Wire.connect(url)
        body = b'{"prompt":"ab","max_tokens":2,"n":2,"stream":true,"temperature":0}'
        await wire.send("POST", COMPLETIONS, body)
        await wire.head()
        firsts = [await wire.chunk() for _ in range(2)]
        assert all(b'"text":"a"' in chunk for chunk in firsts)
        assert await wire.chunk() == b": keep-alive\n\n"
        go.set()
        events = events_of(b"".join(await wire.chunks()))
        await wire.close()
    assert sorted(event["choices"][0]["index"] for event in events) == [0, 1]


FAILURES: list[tuple[EngineError, int, str, str]] = [
    (
        RequestFailed("the forward pass failed: RuntimeError", "forward"),
        500,
        "server_error",
        "forward_failed",
    ),
    (EngineDead("The engine has stopped after a fault."), 503, "server_error", "engine_dead"),
    (Overloaded("The server is shutting down.", code="draining"), 503, "overloaded_error", "draining"),
]


@pytest.mark.parametrize(("failure", "status", "kind", "code"), FAILURES)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_failure_is_a_status_before_the_first_byte_and_an_event_after_it(
    failure: EngineError, status: int, kind: str, code: str, n: int
) -> None:
    engine = FakeEngine(failure=failure, fail_at=2)
    body = {"prompt": "abc", "n": n, "temperature": 0}
    async with server_url(engine) as url:
        reply = await ask(url, "POST", COMPLETIONS, body)
        streamed = await ask(url, "POST", COMPLETIONS, {**body, "stream": True})
    assert (reply.status, reply.json()["error"]["type"], reply.json()["error"]["code"]) == (
        status,
        kind,
        code,
    )
    events = events_of(streamed.body)
    assert streamed.status == 200
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1] == reply.json()
    assert engine.num_open == 0


async def test_an_error_nobody_foresaw_ends_the_stream_without_telling_why() -> None:
    async def gate(i: int) -> None:
        if i == 1:
            raise ValueError("secret at 0x7f00 in /root/x.py")
        await asyncio.sleep(0)

    for n in (1, 2):
        engine = FakeEngine(gate=gate)
        async with server_url(engine) as url:
            reply = await ask(url, "POST", COMPLETIONS, {"prompt": "abc", "n": n})
            streamed = await ask(url, "POST", COMPLETIONS, {"prompt": "abc", "n": n, "stream": True})
        assert reply.status == 500
        assert events_of(streamed.body)[-1] == reply.json()
        assert b"secret" not in reply.body + streamed.body
        assert engine.num_open == 0


async def test_options_of_a_stream_change_nothing_where_there_is_none() -> None:
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
    async with server_url(FakeEngine()) as url:
        whole = await ask(url, "POST", COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        plain = await ask(url, "POST", COMPLETIONS, body)
    assert (whole.status, whole.json()["choices"]) == (200, plain.json()["choices"])
