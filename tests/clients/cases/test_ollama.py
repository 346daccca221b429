"""The official `ollama` package: chats, prompts, streams, tools and forms; blocking and async."""

from __future__ import annotations

import ollama
import pytest
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Say hello."}]


class Point(BaseModel):
    x: int
    name: str


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: which one
    """
    return f"rain in {city}"


@pytest.fixture
def client(either: str) -> ollama.Client:
    return ollama.Client(host=either)


@pytest.fixture
def model(client: ollama.Client) -> str:
    name = client.list().models[0].model
    assert name is not None and name.endswith(":latest")
    return str(name)


def test_chat(client: ollama.Client, model: str) -> None:
    options = {"num_predict": 20, "temperature": 0, "num_ctx": 4096}
    whole = client.chat(model=model, messages=HELLO, options=options, keep_alive="5m")
    assert whole.message.content and whole.done and whole.eval_count and whole.eval_duration
    chunks = list(client.chat(model=model, messages=HELLO, options=options, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_generate(client: ollama.Client, model: str) -> None:
    whole = client.generate(model=model, prompt="Say hello.", system="Be brief.", options={"num_predict": 20})
    assert whole.response and whole.prompt_eval_count
    chunks = client.generate(model=model, prompt="Once", raw=True, stream=True, options={"num_predict": 20})
    assert "".join(chunk.response for chunk in chunks)


def test_form(client: ollama.Client, model: str) -> None:
    whole = client.chat(
        model=model,
        messages=HELLO,
        format=Point.model_json_schema(),
        options={"temperature": 0, "num_predict": 300},
    )
    assert Point.model_validate_json(whole.message.content or "")


def test_what_there_is(client: ollama.Client, model: str) -> None:
    card = client.show(model)
    assert card.capabilities and "completion" in card.capabilities
    assert card.modelinfo and card.modelinfo["general.architecture"]
    running = client.ps().models[0]
    assert running.context_length and running.expires_at
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(model="nope", messages=HELLO)
    assert refused.value.status_code == 404 and "nope" in refused.value.error


def test_tools(scripted: str) -> None:
    client, messages = ollama.Client(host=scripted), [ollama.Message(**HELLO[0])]
    first = client.chat(model="test-model", messages=messages, tools=[weather])
    (call,) = first.message.tool_calls or [None]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    result = ollama.Message(role="tool", content=weather(**call.function.arguments), tool_name="weather")
    last = client.chat(model="test-model", messages=[*messages, first.message, result], tools=[weather])
    assert last.message.content == "The answer is 42."


async def test_thinking_async(scripted: str) -> None:
    client = ollama.AsyncClient(host=scripted)
    thought = said = ""
    async for chunk in await client.chat(model="test-model", messages=HELLO, think=True, stream=True):
        thought += chunk.message.thinking or ""
        said += chunk.message.content or ""
    assert (thought.strip(), said) == ("Let me see.", "The answer is 42.")
