"""Every wrong request gets the status, type, code and param of the contract, and no more of itself back."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest

from tests.e2e.wire import RawReply, Wire, ask

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def check_error(reply: RawReply, status: int, kind: str, code: str | None, param: str | None) -> str:
    """The reply is this error and gives nothing away; its message."""
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["code"], error["param"]) == (status, kind, code, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]
    assert int(reply.headers["openai-processing-ms"]) >= 0
    assert not re.search(rb"0x[0-9a-f]|/root|/work|Traceback|<class|object at 0x", reply.body)
    assert len(error["message"]) <= 1000
    return str(error["message"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [*HELLO, {"role": "tool", "content": "4"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": ""}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "top_logprobs": 1}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_a_wrong_chat_is_400_and_named(url: str, body: dict[str, Any], param: str) -> None:
    check_error(await ask(url, "POST", CHAT, body), 400, "invalid_request_error", None, param)


@pytest.mark.parametrize("value", ["", "0", "-5", "1e10", "nan", "inf", "5 s", "1_0", "0x5"])
async def test_a_wrong_deadline_header_is_400_and_named(url: str, value: str) -> None:
    headers = {"x-request-deadline-ms": value or " "}
    reply = await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, headers)
    check_error(reply, 400, "invalid_request_error", None, "x-request-deadline-ms")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"\xff",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": -1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "user": "\\udc00"}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
    ],
)
async def test_what_is_not_json_is_400(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = await ask(url, "POST", COMPLETIONS, body, headers)
    message = check_error(reply, 400, "invalid_request_error", None, reply.json()["error"]["param"])
    assert not re.search("EOF|parsing|ident|hex|unicode|recursion|trailing", message), message


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
async def test_what_does_not_call_itself_json_is_415(url: str, content_type: str) -> None:
    reply = await ask(url, "POST", COMPLETIONS, b'{"prompt":"a"}', {"content-type": content_type})
    check_error(reply, 415, "invalid_request_error", "unsupported_media_type", None)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
async def test_json_by_any_of_its_names_is_read(url: str, content_type: str) -> None:
    reply = await ask(url, "POST", COMPLETIONS, b'{"prompt":"a"}', {"content-type": content_type})
    assert reply.status == 200


async def test_a_compressed_body_is_415(url: str) -> None:
    packed, json_type = gzip.compress(b'{"prompt":"a"}'), {"content-type": "application/json"}
    for coding in ("gzip", "zstd", "identity, gzip"):
        reply = await ask(url, "POST", COMPLETIONS, packed, json_type | {"content-encoding": coding})
        message = check_error(reply, 415, "invalid_request_error", "unsupported_media_type", None)
        assert "compressed" in message and reply.headers["accept-encoding"] == "identity"
    plain = json_type | {"content-encoding": "Identity"}
    assert (await ask(url, "POST", COMPLETIONS, b'{"prompt":"a"}', plain)).status == 200


async def test_a_body_over_the_cap_is_413(url: str) -> None:
    reply = await ask(url, "POST", COMPLETIONS, {"prompt": "a" * 100_000})
    check_error(reply, 413, "invalid_request_error", "body_too_large", None)
    chunk = b"%x\r\n" % 60_000 + b"a" * 60_000 + b"\r\n"
    chunked = {"transfer-encoding": "chunked", "content-length": "", "content-type": "application/json"}
    reply = await ask(url, "POST", COMPLETIONS, chunk * 2 + b"0\r\n\r\n", chunked)
    check_error(reply, 413, "invalid_request_error", "body_too_large", None)


async def test_headers_over_the_cap_are_431(url: str) -> None:
    reply = await ask(url, "GET", "/v1/models", None, {f"x-{i}": "v" * 1000 for i in range(70)})
    check_error(reply, 431, "invalid_request_error", "headers_too_large", None)


@pytest.mark.parametrize(
    ("body", "param", "total"),
    [
        ({"prompt": "a" * 300}, "prompt", 316),
        ({"prompt": "a" * 250, "max_tokens": 7}, "max_tokens", 257),
        ({"prompt": "a", "max_tokens": 2**31 - 1}, "max_tokens", 2**31),
        ({"prompt": ["a", "b" * 256]}, "prompt", 272),
    ],
)
async def test_what_is_too_long_says_how_long(url: str, body: dict[str, Any], param: str, total: int) -> None:
    reply = await ask(url, "POST", COMPLETIONS, body)
    message = check_error(reply, 400, "invalid_request_error", "context_length_exceeded", param)
    assert message.startswith("This model's maximum context length is 256 tokens. However, you requested ")
    assert f"requested {total} tokens" in message


async def test_a_conversation_that_fills_the_context_is_too_long(url: str) -> None:
    for length in (250, 251, 400):  # with <user> before it, 256 tokens and more
        reply = await ask(url, "POST", CHAT, {"messages": [{"role": "user", "content": "a" * length}]})
        check_error(reply, 400, "invalid_request_error", "context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": ["a"] * 33}, "prompt"), ({"prompt": ["a"] * 5, "n": 8}, "prompt")]
)
async def test_what_no_queue_could_hold_is_400(url: str, body: dict[str, Any], param: str) -> None:
    check_error(await ask(url, "POST", COMPLETIONS, body), 400, "invalid_request_error", None, param)


async def test_an_unknown_model_is_404(url: str) -> None:
    for body in ({"prompt": "a", "model": "x" * 5000}, {"prompt": "a", "model": ""}):
        reply = await ask(url, "POST", COMPLETIONS, body)
        message = check_error(reply, 404, "not_found_error", "model_not_found", "model")
        assert len(message) < 250
    reply = await ask(url, "GET", "/v1/models/nope")
    check_error(reply, 404, "not_found_error", "model_not_found", "model")


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/completions/", "//v1/models", "/V1/models"])
async def test_an_unknown_path_is_404(url: str, path: str) -> None:
    check_error(await ask(url, "GET", path), 404, "not_found_error", "not_found", None)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/models", "/v1/models"),
        ("/models/a/b", "/v1/models/a/b"),
        ("/v1/tokenise", None),
        ("/", None),
        ("//", None),
    ],
)
async def test_a_path_that_misses_v1_or_has_too_much_names_the_right_one(
    url: str, path: str, meant: str | None
) -> None:
    reply = await ask(url, "POST", path, {"messages": HELLO})
    if path == "/":
        check_error(reply, 405, "invalid_request_error", "method_not_allowed", None)
        return
    message = check_error(reply, 404, "not_found_error", "not_found", None)
    assert message.startswith(f"There is no path '{path}' here: ")
    assert message.endswith("GET /openapi.json lists all." if meant is None else f"use '{meant}'.")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (COMPLETIONS, "POST"),
        (CHAT, "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/a/b", "GET, HEAD"),
        ("/tokenize", "POST"),
        ("/detokenize", "POST"),
        ("/tokenizer_info", "GET, HEAD"),
        *((path, "GET, HEAD") for path in ("/health", "/health/live", "/health/ready", "/ping", "/ready")),
        *((path, "GET, HEAD") for path in ("/metrics", "/version", "/load")),
        ("/server_info", "GET, HEAD, PATCH"),
        ("/v1/requests", "GET, HEAD"),
        ("/v1/requests/a", "GET, HEAD, PATCH"),
        ("/v1/requests/a/b", "GET, HEAD, PATCH"),
        ("/v1/requests/a/cancel", "POST"),
        ("/reset_prefix_cache", "POST"),
        ("/", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_405_with_all_that_are_allowed(url: str, path: str, allowed: str) -> None:
    reply = await ask(url, "DELETE", path)
    message = check_error(reply, 405, "invalid_request_error", "method_not_allowed", None)
    assert message == f"'{path}' does not take DELETE; it takes {allowed}."
    assert reply.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/version", "/", "/openapi.json"])
async def test_a_head_is_a_get_without_its_body(url: str, path: str) -> None:
    """Over one connection: a body behind the first reply would be read as the second."""
    wire = await Wire.connect(url)
    await wire.send("HEAD", path)
    status, headers = await wire.head()
    await wire.send("GET", path)
    got_status, got_headers = await wire.head()
    await wire.close()
    assert status == got_status == 200
    assert headers["content-type"] == got_headers["content-type"]


async def test_a_head_of_what_is_only_posted_is_405(url: str) -> None:
    wire = await Wire.connect(url)
    await wire.send("HEAD", COMPLETIONS)
    status, headers = await wire.head()
    await wire.close()
    assert (status, headers["allow"]) == (405, "POST")


async def test_many_errors_make_a_short_reply(url: str) -> None:
    body = {"prompt": ["a", 1] * 5000, "stop_token_ids": ["x" * 50] * 1000, "temperature": "hot", "n": "x"}
    reply = await ask(url, "POST", COMPLETIONS, body)
    check_error(reply, 400, "invalid_request_error", None, reply.json()["error"]["param"])
    assert len(reply.body) < 1200
    assert b"xxxxx" not in reply.body


async def test_an_unknown_field_with_a_huge_name_stays_small(url: str) -> None:
    fields = {f"{'x' * 1000}{i}": 1 for i in range(30)} | {"é\n": 1}
    reply = await ask(url, "POST", COMPLETIONS, {"prompt": "a", **fields})
    assert reply.status == 200
    assert len(reply.headers["x-slipstream-ignored"]) < 2000
    assert json.loads(reply.body)["choices"]
