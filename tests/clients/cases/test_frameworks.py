"""Frameworks over the official clients, each with the loop that its users run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

MODEL = "test-model"  # the scripted one's


class Point(BaseModel):
    """A point."""

    x: int
    name: str


def test_openai_agents(scripted: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none")
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        agent = agents.Agent(name="a", instructions="Help.", model=model, tools=[weather])
        assert "42" in agents.Runner.run_sync(agent, "How is Paris?").final_output


async def test_openai_agents_streamed(scripted: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none")
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    agent = agents.Agent(name="a", model=model, output_type=Point)
    result = agents.Runner.run_streamed(agent, "A point.")
    assert [event async for event in result.stream_events()]
    assert result.final_output == Point(x=42, name="Paris")


@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain_openai(scripted: str, uses_responses: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{scripted}/v1", api_key="none", use_responses_api=uses_responses
    )
    assert "42" in str(model.invoke("hi").content)
    assert "".join(str(chunk.text) for chunk in model.stream("hi"))
    bound = model.bind_tools([Point])
    assert bound.invoke("hi").tool_calls[0]["args"] == {"x": 42, "name": "Paris"}
    assert model.with_structured_output(Point).invoke("hi") == Point(x=42, name="Paris")


def test_langchain_anthropic(scripted: str) -> None:
    langchain = pytest.importorskip("langchain_anthropic")
    model = langchain.ChatAnthropic(model=MODEL, base_url=scripted, api_key="none", max_tokens=500)
    assert "42" in str(model.invoke("hi").content)
    assert "".join(str(chunk.text) for chunk in model.stream("hi"))
    call = model.bind_tools([Point]).invoke("hi").tool_calls[0]
    assert call["args"] == {"x": 42, "name": "Paris"}
    assert model.with_structured_output(Point).invoke("hi") == Point(x=42, name="Paris")


def test_litellm(scripted: str) -> None:
    litellm = pytest.importorskip("litellm")
    hello = [{"role": "user", "content": "hi"}]
    common: dict[str, Any] = {"api_key": "none", "api_base": f"{scripted}/v1"}
    whole = litellm.completion(model=f"openai/{MODEL}", messages=hello, **common)
    assert "42" in whole.choices[0].message.content
    chunks = litellm.completion(model=f"openai/{MODEL}", messages=hello, stream=True, **common)
    assert "42" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    response = litellm.responses(model=f"openai/{MODEL}", input="hi", **common)
    assert "42" in response.output_text
    events = list(litellm.responses(model=f"openai/{MODEL}", input="hi", stream=True, **common))
    assert events[-1].type == "response.completed"
    spoken = litellm.completion(
        model=f"anthropic/{MODEL}", messages=hello, api_key="none", api_base=scripted, max_tokens=100
    )
    assert "42" in spoken.choices[0].message.content


def test_llama_index(scripted: str) -> None:
    llama = pytest.importorskip("llama_index.llms.openai_like")
    model = llama.OpenAILike(
        model=MODEL, api_base=f"{scripted}/v1", api_key="none", is_chat_model=True, context_window=4096
    )
    assert "42" in str(model.complete("hi"))
    assert "42" in str(list(model.stream_complete("hi"))[-1])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(scripted: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{scripted}/v1", api_key="none"), mode=instructor.Mode[mode]
    )
    point = client.chat.completions.create(
        model=MODEL, response_model=Point, messages=[{"role": "user", "content": "A point."}]
    )
    assert (point.x, point.name) == (42, "Paris")


def test_instructor_anthropic(scripted: str) -> None:
    instructor = pytest.importorskip("instructor")
    anthropic = pytest.importorskip("anthropic")
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=scripted, api_key="none"))
    point = client.messages.create(
        model=MODEL,
        max_tokens=500,
        response_model=Point,
        messages=[{"role": "user", "content": "A point."}],
    )
    assert (point.x, point.name) == (42, "Paris")


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel", "AnthropicModel"])
def test_pydantic_ai(scripted: str, kind: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    if kind == "AnthropicModel":
        from pydantic_ai.models import anthropic as models
        from pydantic_ai.providers.anthropic import AnthropicProvider as Provider

        provider: Any = Provider(base_url=scripted, api_key="none")
    else:
        from pydantic_ai.models import openai as models
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{scripted}/v1", api_key="none")
    model = getattr(models, kind)(MODEL, provider=provider)
    agent = ai.Agent(model, instructions="Help.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    assert "42" in agent.run_sync("How is Paris?").output
    assert ai.Agent(model, output_type=Point).run_sync("A point.").output == Point(x=42, name="Paris")


def test_smolagents(scripted: str) -> None:
    smol = pytest.importorskip("smolagents")

    @smol.tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: which one
        """
        return f"rain in {city}"

    model = smol.OpenAIModel(model_id=MODEL, api_base=f"{scripted}/v1", api_key="none")
    agent = smol.ToolCallingAgent(tools=[weather], model=model, max_steps=4, verbosity_level=0)
    assert agent.run("How is Paris?") == "Paris"


def test_dspy(scripted: str) -> None:
    dspy = pytest.importorskip("dspy")
    model = dspy.LM(f"openai/{MODEL}", api_base=f"{scripted}/v1", api_key="none", cache=False)
    with dspy.context(lm=model):
        assert dspy.Predict("question -> answer")(question="What is it?").answer == "42"


def test_huggingface_hub(scripted: str) -> None:
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(base_url=f"{scripted}/v1", api_key="none")
    hello = [{"role": "user", "content": "hi"}]
    assert "42" in client.chat_completion(hello, model=MODEL).choices[0].message.content
    chunks = client.chat_completion(hello, model=MODEL, stream=True)
    assert "42" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_json_is_what_a_tool_gets(scripted: str) -> None:
    """Arguments arrive as the JSON text that OpenAI's format has."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{scripted}/v1", api_key="none")
    tool = {"type": "function", "name": "point", "parameters": Point.model_json_schema(), "strict": False}
    call = client.responses.create(model=MODEL, input="hi", tools=[tool]).output[0]
    assert json.loads(call.arguments) == {"x": 42, "name": "Paris"}
