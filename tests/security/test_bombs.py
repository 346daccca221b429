"""Requests made to take all time or memory: each is answered soon, and the loop serves others meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from server.api.openai.protocol_values import MAX_SCHEMA_CHARS, MAX_TOKEN_IDS
from server.http.json_body import MAX_PARTS, MAX_VALUES
from tests.e2e.http_server import server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask
from tests.support.loop_lag import loop_lags
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY_BYTES = 8 * 2**20 - 100
HELLO = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "content": "3"}
PART = {"type": "text", "text": "hi"}
OK = {"prompt": "hi", "max_tokens": 2}

OWN_S = 0.1  # of one turn of the loop, computing
WALL_S = 1.0  # the same by the clock, on a machine that has other things to do
REPLY_S = 5.0
GROWTH_BYTES = 100 << 20


def filled(before: str, piece: str, after: str) -> bytes:
    """As many pieces as the largest body has room for."""
    count = (BODY_BYTES - len(before) - len(after)) // (len(piece.encode()) + 1)
    return (before + ",".join([piece] * count) + after).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps(OK | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [HELLO], "max_tokens": 2} | fields).encode()


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


SERVED = "text_completion"
LONG = "context_length_exceeded"
PARTS = f"more than {MAX_PARTS} lists, objects and keys"
VALUES = f"more than {MAX_VALUES} values"
QUEUE = "generations at once; the queue holds"
CHARS = f"more than {MAX_SCHEMA_CHARS} characters"
IDS = f"the limit is {MAX_TOKEN_IDS}"
SPECIAL = "<|im_start|>" * 10_000

# What must be in the reply.
TEXTS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "one letter": (COMPLETIONS, lambda: completion(prompt="a" * 10**6), LONG),
    "dashes": (COMPLETIONS, lambda: completion(prompt="-" * 10**5), LONG),
    "spaces": (COMPLETIONS, lambda: completion(prompt=" " * 10**6), LONG),
    "one emoji": (COMPLETIONS, lambda: completion(prompt="👩‍👩‍👧" * 10**5), LONG),
    "words": (COMPLETIONS, lambda: completion(prompt="a b " * 10**6), LONG),
    "special tokens": (COMPLETIONS, lambda: completion(prompt=SPECIAL), LONG),
    "special tokens in a chat": (CHAT, lambda: chat(messages=[{"role": "user", "content": SPECIAL}]), LONG),
    "some special tokens": (
        COMPLETIONS,
        lambda: completion(prompt="<|im_start|><|im_end|>" * 5),
        "text_completion",
    ),
    "the largest text": (COMPLETIONS, lambda: completion(prompt="a" * (BODY_BYTES - 100)), LONG),
    "the largest text escaped": (COMPLETIONS, lambda: completion(prompt="é" * (BODY_BYTES // 6 - 100)), LONG),
    "many long texts": (COMPLETIONS, lambda: completion(prompt=["a" * 200_000] * 30), LONG),
    "a prediction": (
        COMPLETIONS,
        lambda: completion(prediction={"type": "content", "content": "a" * 10**6}),
        LONG,
    ),
    "bad words": (COMPLETIONS, lambda: completion(bad_words=["a" * 1000] * 256), SERVED),
    "to be tokenized": ("/tokenize", lambda: json.dumps({"prompt": "a" * 10**6}).encode(), LONG),
    "a name": (CHAT, lambda: chat(messages=[{**HELLO, "name": "a" * (BODY_BYTES - 100)}]), LONG),
    "a call's id": (CHAT, lambda: chat(messages=[{**RESULT, "tool_call_id": "a" * 10**6}]), LONG),
    "ten thousand short messages": (CHAT, lambda: chat(messages=[HELLO] * 8192), LONG),
}
LISTS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "deep": (
        COMPLETIONS,
        lambda: b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "nested too deeply",
    ),
    "unclosed": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * 100_000, "nested too deeply"),
    "an endless number": (
        COMPLETIONS,
        lambda: b'{"prompt":"a","seed":' + b"9" * 4_000_000 + b"}",
        "too many digits",
    ),
    "a large number": (COMPLETIONS, lambda: completion(seed=2**64), "seed"),
    "token ids": (COMPLETIONS, lambda: filled('{"prompt":[', "1", "]}"), VALUES),
    "a million token ids": (COMPLETIONS, lambda: completion(prompt=[1] * 10**6), LONG),
    "prompts": (COMPLETIONS, lambda: filled('{"prompt":[', '"a"', "]}"), VALUES),
    "prompts of ids": (COMPLETIONS, lambda: filled('{"prompt":[', "[1]", "]}"), PARTS),
    "a hundred thousand prompts": (COMPLETIONS, lambda: completion(prompt=[[1]] * 10**5), QUEUE),
    "prompts and choices": (COMPLETIONS, lambda: completion(prompt=["a"] * 1000, n=128), QUEUE),
    "choices": (COMPLETIONS, lambda: completion(n=10**9), "the limit is 128"),
    "choices beyond numbers": (COMPLETIONS, lambda: completion(n=10**30), "at most 2147483647"),
    "best of": (COMPLETIONS, lambda: completion(best_of=10**6), "best_of"),
    "messages": (CHAT, lambda: filled('{"messages":[', json.dumps(HELLO), "]}"), PARTS),
    "a hundred thousand messages": (CHAT, lambda: chat(messages=[HELLO] * 10**5), PARTS),
    "nine thousand messages": (CHAT, lambda: chat(messages=[HELLO] * 9000), "the limit is 8192"),
    "wrong messages": (CHAT, lambda: chat(messages=[{"role": 1}] * 8192), "role"),
    "text parts": (
        CHAT,
        lambda: chat(messages=[{**HELLO, "content": [PART] * 10**5}]),
        PARTS,
    ),
    "unknown fields": (COMPLETIONS, lambda: completion(**{f"k{i}": 1 for i in range(MAX_PARTS)}), PARTS),
    "logit bias": (
        COMPLETIONS,
        lambda: completion(logit_bias={str(i): 1 for i in range(10**5)}),
        "at most 1024",
    ),
    "stop strings": (COMPLETIONS, lambda: filled('{"prompt":"a","stop":[', '"a"', "]}"), VALUES),
    "a million stop strings": (COMPLETIONS, lambda: completion(stop=["a"] * 10**6), "the limit is 16"),
    "stop ids": (COMPLETIONS, lambda: completion(stop_token_ids=[5] * (MAX_TOKEN_IDS + 1)), IDS),
    "a million stop ids": (COMPLETIONS, lambda: completion(stop_token_ids=[5] * 10**6), SERVED),
    "a million allowed ids": (
        COMPLETIONS,
        lambda: completion(allowed_token_ids=[5, 6] * 500_000),
        "text_completion",
    ),
    "ids to be text": ("/detokenize", lambda: filled('{"tokens":[', "5", "]}"), VALUES),
    "tools": (CHAT, lambda: filled('{"messages":[],"tools":[', json.dumps(tool({})), "]}"), PARTS),
    "a tool's values": (CHAT, lambda: chat(tools=[tool({"type": "object", "x": [1] * 10**6})]), CHARS),
    "a tool's text": (
        CHAT,
        lambda: chat(tools=[tool({"type": "object", "x": "a" * 10**6})]),
        "the limit is 65536",
    ),
    "a call's arguments": (CHAT, lambda: chat(messages=[call("[" + "[]," * 10**6 + "1]")]), PARTS),
}
FORMS: dict[str, dict[str, Any]] = {
    "choices": {"choice": ["a"] * 10**6},
    "a schema's values": {"json": {"a": [1] * 10**6}},
    "a schema's text": {"json": {"const": "a" * 10**6}},
    "a deep schema": {"json": '{"items":' * 10**5 + "{}" + "}" * 10**5},
    "maxItems": {"json": {"type": "array", "items": {"type": "array"}, "maxItems": 2**64 - 1}},
    "a long expression": {"regex": "a" * 10**6},
    "a deep expression": {"regex": "(" * 10**5 + "a" + ")" * 10**5},
    "repetitions of repetitions": {"regex": "((a{1,999}){1,999}){1,999}"},
    "a grammar of itself": {"grammar": "root ::= root"},
    "a long grammar": {"grammar": "start: a\n" * 10**5},
}


@asynccontextmanager
async def warm_server(folder: Path, **settings: Any) -> AsyncIterator[str]:
    """A server with a real tokenizer; as after a start, what is loaded is not collected again and again."""
    model = save_tiny_model("llama", folder / "llama")
    async with real_engine(model) as engine, server_url(engine, **settings) as url:
        assert (await ask(url, "POST", COMPLETIONS, OK)).status == 200
        gc.collect()
        gc.freeze()
        try:
            yield url
        finally:
            gc.unfreeze()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with warm_server(tmp_path_factory.mktemp("bombs")) as url:
        yield url


async def check(url: str, path: str, make: Callable[[], bytes], expected: str) -> None:
    """One bomb, then what any other client sees."""
    body = make()
    before = psutil.Process().memory_info().rss
    async with loop_lags() as lags:
        async with asyncio.timeout(REPLY_S * 4):
            reply = await ask(url, "POST", path, body)
        await asyncio.sleep(0.005)
    assert expected.encode() in reply.body, reply.body[:300]
    assert reply.status == (200 if expected == SERVED else 400)
    assert len(reply.body) < 3000
    assert max(lags.own) < OWN_S
    assert max(lags.wall) < WALL_S
    assert (await ask(url, "POST", COMPLETIONS, OK)).status == 200
    assert psutil.Process().memory_info().rss - before < GROWTH_BYTES


@pytest.mark.parametrize("name", TEXTS)
async def test_texts(url: str, name: str) -> None:
    await check(url, *TEXTS[name])


@pytest.mark.parametrize("name", LISTS)
async def test_lists_and_numbers(url: str, name: str) -> None:
    await check(url, *LISTS[name])


@pytest.mark.parametrize("name", FORMS)
async def test_forms(url: str, name: str) -> None:
    body = completion(structured_outputs=FORMS[name], max_tokens=1)
    async with loop_lags() as lags:
        reply = await ask(url, "POST", COMPLETIONS, body)
        await asyncio.sleep(0.005)
    # What the compiler can do is done, the rest is refused.
    assert reply.status in (200, 400), reply.body
    assert len(reply.body) < 3000
    assert max(lags.own) < OWN_S
    assert (await ask(url, "POST", COMPLETIONS, OK)).status == 200


async def test_no_number_of_choices_takes_memory(url: str) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    for n in (129, 10**6, 10**9, 2**31, 2**63, 10**30, -1, 0):
        assert (await ask(url, "POST", COMPLETIONS, completion(n=n))).status == 400
    assert process.memory_info().rss - before < 50 << 20


async def test_text_that_looks_like_json_is_no_list(url: str) -> None:
    """Brackets within a text are counted as what they are."""
    text = json.dumps([{"a": [], 'quoted "b"': "\\"}] * 30_000)
    assert text.count("[") + text.count("{") + text.count(":") > MAX_PARTS / 2
    reply = await ask(url, "POST", COMPLETIONS, completion(prompt=text * 3))
    assert reply.json()["error"]["code"] == LONG
