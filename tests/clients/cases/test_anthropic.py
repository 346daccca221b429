"""The official `anthropic` package: messages, streams, tools and counted tokens; blocking and async."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anthropic
import pytest

HELLO: Any = [{"role": "user", "content": "Say hello."}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}


@pytest.fixture
def client(either: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=either, api_key="none", max_retries=0)


@pytest.fixture
def model(client: anthropic.Anthropic, either: str) -> str:
    with urllib.request.urlopen(f"{either}/v1/models") as reply:
        return str(json.load(reply)["data"][0]["id"])


def test_messages(client: anthropic.Anthropic, model: str) -> None:
    whole = client.messages.create(model=model, max_tokens=20, messages=HELLO, system="Be brief.")
    assert whole.content[0].type == "text" and whole.content[0].text
    assert whole.usage.output_tokens
    with client.messages.stream(model=model, max_tokens=20, messages=HELLO) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason


def test_tools(client: anthropic.Anthropic, model: str) -> None:
    forced: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=model,
        max_tokens=300,
        messages=HELLO,
        tools=[TOOL],
        tool_choice=forced,
        extra_body={"temperature": 0},
    ) as stream:
        first = stream.get_final_message()
    call = first.content[0]
    assert call.type == "tool_use" and set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    more: Any = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(model=model, max_tokens=30, messages=more, tools=[TOOL])
    count = client.messages.count_tokens(model=model, messages=more, tools=[TOOL])
    assert count.input_tokens == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)


async def test_async(either: str, model: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=either, api_key="none", max_retries=0) as client:
        async with client.messages.stream(model=model, max_tokens=20, messages=HELLO) as stream:
            assert [event.type async for event in stream][-1] == "message_stop"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="nope", max_tokens=20, messages=HELLO)


def test_thinking(scripted: str) -> None:
    client = anthropic.Anthropic(base_url=scripted, api_key="none", max_retries=0)
    message = client.messages.create(
        model="test-model",
        max_tokens=2000,
        messages=HELLO,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_the_tool_runner(scripted: str) -> None:
    client = anthropic.Anthropic(base_url=scripted, api_key="none", max_retries=0)

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(
        model="test-model", max_tokens=500, tools=[weather], messages=HELLO
    )
    last = runner.until_done()
    assert last.content[0].type == "text" and "42" in last.content[0].text
