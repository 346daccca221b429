"""The official `openai` package: chat, completions and responses; blocking, async, streamed and parsed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

MODEL = "any"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


class Point(BaseModel):
    x: int
    name: str


@pytest.fixture
def client(either: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{either}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_chat(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=HELLO, max_tokens=20)
    assert whole.choices[0].message.content and whole.usage
    chunks = client.chat.completions.create(model=model, messages=HELLO, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_chat_with_tools(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=HELLO, tools=[CHAT_TOOL], tool_choice="required", max_tokens=300, temperature=0
    )
    message = whole.choices[0].message
    calls: Any = message.tool_calls
    assert json.loads(calls[0].function.arguments).keys() == {"city"}
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}
    more: Any = [*HELLO, message, result]
    last = client.chat.completions.create(model=model, messages=more, tools=[CHAT_TOOL], max_tokens=30)
    assert last.choices[0].finish_reason


def test_chat_parsed(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(
        model=model, messages=HELLO, response_format=Point, max_tokens=300, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)


def test_completions(client: openai.OpenAI, model: str) -> None:
    assert client.completions.create(model=model, prompt="One, two,", max_tokens=8).choices[0].text
    stream = client.completions.create(model=model, prompt="One, two,", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


def test_responses(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input="Say hello.", max_output_tokens=20)
    assert whole.output_text and whole.usage and whole.usage.output_tokens
    again = client.responses.create(
        model=model, input="Once more.", previous_response_id=whole.id, max_output_tokens=20
    )
    assert again.usage and again.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(again.id).output_text == again.output_text
    client.responses.delete(again.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_responses_streamed(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Say hello.", max_output_tokens=20) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        events = client.responses.create(model=model, input="Hi.", max_output_tokens=20, stream=True)
        assert [event.sequence_number for event in events][:3] == [0, 1, 2]
    assert text


def test_responses_with_tools(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model, input="Say hello.", tools=[TOOL], tool_choice="required", temperature=0
    ) as stream:
        for _ in stream:
            pass
        first = stream.get_final_response()
    call = first.output[0]
    assert call.type == "function_call" and json.loads(call.arguments).keys() == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    last = client.responses.create(
        model=model, previous_response_id=first.id, input=[result], tools=[TOOL], max_output_tokens=30
    )
    assert last.status in ("completed", "incomplete")


def test_responses_parsed(client: openai.OpenAI, model: str) -> None:
    parsed = client.responses.parse(
        model=model, input="A point.", text_format=Point, max_output_tokens=300, temperature=0
    )
    assert isinstance(parsed.output_parsed, Point)


async def test_all_three_async(either: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{either}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        chat = await client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        assert [chunk async for chunk in chat][-1].usage
        assert (await client.completions.create(model=model, prompt="a", max_tokens=8)).choices[0].text
        async with client.responses.stream(model=model, input="Hi.", max_output_tokens=8) as stream:
            last = [event async for event in stream][-1]
        assert last.type in ("response.completed", "response.incomplete") and last.response.output_text


def test_reasoning(scripted: str) -> None:
    client = openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.responses.create(
        model=model, input="hi", reasoning={"effort": "low"}, include=["reasoning.encrypted_content"]
    )
    thought, message = whole.output
    assert thought.type == "reasoning" and thought.content and thought.encrypted_content
    assert message.type == "message"
    given: Any = [{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "so?"}]
    assert client.responses.create(model=model, input=given).output_text
