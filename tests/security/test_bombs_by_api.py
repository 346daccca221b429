"""Bombs in the shapes of other APIs than OpenAI's first two: the loop serves others meanwhile."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.security.test_bombs import HELLO, RESULT, check, warm_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
TOO_LONG, LONG_THERE = "prompt is too long", "maximum context length"
MANY = range(8192)  # blocks, items and messages, the most there may be


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [HELLO, *messages, HELLO], "max_tokens": 2} | fields).encode()


def responses(*items: Any, **fields: Any) -> bytes:
    return json.dumps({"input": [HELLO, *items], "max_output_tokens": 2} | fields).encode()


def called(arguments: Any) -> list[dict[str, Any]]:
    return [{"function": {"name": "f", "arguments": arguments}, "id": f"c{i}"} for i in range(128)]


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": called(arguments)}


def used() -> list[dict[str, Any]]:
    uses = [{"type": "tool_use", "id": f"t{i}", "name": "f", "input": {}} for i in MANY]
    results = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": "3"} for i in MANY]
    return [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]


def items() -> list[dict[str, Any]]:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    return [{**call, "call_id": f"c{i}"} for i in MANY[1:]]


def groups() -> list[dict[str, Any]]:
    functions = [{"type": "function", "name": f"f{i}", "parameters": {}} for i in range(128)]
    return [{"type": "namespace", "name": f"n{i}", "tools": functions} for i in range(100)]


def schema() -> dict[str, Any]:
    text = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "object", "properties": {f"p{i}": text for i in range(12_000)}}
    return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": form}}


# What must be in the reply.
BOMBS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "calls of a chat": (CHAT, lambda: chat(*[calling("{}")] * 180), LONG_THERE),
    "calls to be tokenized": ("/tokenize", lambda: chat(*[calling("{}")] * 180), LONG_THERE),
    "a schema": (CHAT, lambda: chat(response_format=schema()), "the limit is 65536"),
    "calls and results": (MESSAGES, lambda: chat(*used()), TOO_LONG),
    "calls and results to be counted": (f"{MESSAGES}/count_tokens", lambda: chat(*used()), TOO_LONG),
    "items": (RESPONSES, lambda: responses(*items()), LONG_THERE),
    "groups of tools": (RESPONSES, lambda: responses(tools=groups(), tool_choice="required"), LONG_THERE),
    "calls by Ollama's API": (OLLAMA, lambda: chat(*[calling({})] * 180, stream=False), LONG_THERE),
    "results of none of them": (
        OLLAMA,
        lambda: chat(*[calling({})] * 90, *[{**RESULT, "tool_name": "g"}] * 7000, stream=False),
        LONG_THERE,
    ),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with warm_server(tmp_path_factory.mktemp("bombs"), ollama_api=True) as url:
        yield url


@pytest.mark.parametrize("name", BOMBS)
async def test_conversations(url: str, name: str) -> None:
    await check(url, *BOMBS[name])
