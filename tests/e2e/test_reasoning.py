"""Reasoning over a real socket: streamed, whole and counted apart from the answer, by the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
REPLY = "<think>\nLet me see.\n</think>\n\nIt rains."
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]


@asynccontextmanager
async def client_of(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def thinking(reply: str = REPLY, **fields: Any) -> FakeEngine:
    return FakeEngine(reasoning="qwen3", reply=reply, max_model_len=4096, **fields)


def body_of(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "temperature": 0, **fields}


async def test_the_official_client_gets_reasoning_apart_from_content() -> None:
    async with client_of(thinking()) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.reasoning) == ("Let me see.", "Let me see.")
    assert message.content == "It rains."
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    # The engine's tokens are characters: all behind <think> but the one that completes </think>.
    assert counted == len("\nLet me see.\n</think>") - 1
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "It rains."
    assert sum(bool(getattr(delta, "reasoning_content", None)) for delta in deltas) > 5
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == counted


async def test_a_reply_that_is_cut_within_its_reasoning() -> None:
    async with server_url(thinking()) as url:
        (choice,) = (await ask(url, "POST", PATH, body_of(max_tokens=22))).json()["choices"]
        cut_mark = (await ask(url, "POST", PATH, body_of(max_tokens=4))).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Let me see.")
    assert (cut_mark["message"]["content"], cut_mark["message"]["reasoning"]) == ("", None)


async def test_thinking_and_then_calling() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    async with server_url(thinking(f"<think>a</think>{call}")) as url:
        message = (await ask(url, "POST", PATH, body_of(tools=TOOLS))).json()["choices"][0]["message"]
        events = events_of((await ask(url, "POST", PATH, body_of(tools=TOOLS, stream=True))).body)
    assert message["reasoning_content"] == "a"
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    kinds = [key for event in events for key in event["choices"][0]["delta"]]
    assert kinds.index("reasoning_content") < kinds.index("tool_calls")


async def test_what_a_request_says_about_thinking_reaches_the_template() -> None:
    engine = thinking()
    said: dict[str, Any] = {}
    async with server_url(engine) as url:
        cases: dict[str, dict[str, Any]] = {
            "nothing": {},
            "off": {"enable_thinking": False},
            "effort": {"reasoning_effort": "high"},
            "no effort": {"reasoning_effort": "none"},
            "own": {"chat_template_kwargs": {"enable_thinking": False, "style": ["x"]}},
        }
        for name, fields in cases.items():
            assert (await ask(url, "POST", PATH, body_of(**fields))).status == 200
            said[name] = engine.options
    on, off = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False))
    assert said == {
        "nothing": {},
        "off": off,
        "effort": {"reasoning_effort": "high", **on},
        "no effort": {"reasoning_effort": "none", **off},
        "own": {"enable_thinking": False, "style": ["x"]},
    }


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_earlier_reasoning_reaches_the_template(name: str) -> None:
    engine = thinking()
    earlier = {"role": "assistant", "content": "Yes.", name: "Hm."}
    async with server_url(engine) as url:
        await ask(url, "POST", PATH, body_of(messages=[*HELLO, earlier, *HELLO]))
    # Templates read it by one of these names; those of LFM2.5 by the last.
    assert [engine.messages[1][key] for key in ("reasoning_content", "reasoning", "thinking")] == ["Hm."] * 3


async def test_a_model_that_does_not_think_says_nothing_of_reasoning() -> None:
    async with server_url(FakeEngine(reply=REPLY, max_model_len=4096)) as url:
        reply = (await ask(url, "POST", PATH, body_of())).json()
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert "completion_tokens_details" not in reply["usage"]
