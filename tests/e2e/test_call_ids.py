"""The ids of earlier calls as the templates of a family want them, whatever ids clients have for them."""

from __future__ import annotations

from typing import Any

from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support.fake_engine import FakeEngine

KIMI = "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
FUNCTION_GEMMA = "{{ tools }}<start_function_call>call:"
GPT_OSS = "{{ tools }}<|start|>assistant<|channel|>commentary to=functions."
MISTRAL_NAMED = "{{ tools }}[TOOL_CALLS]name[CALL_ID]id[ARGS]{}"


def call_of(name: str, **fields: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": "{}"}, **fields}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [call_of("weather", id="call_a"), call_of("clock", id="b")]},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
    {"role": "assistant", "tool_calls": [call_of("weather", id="b")]},
    {"role": "tool", "tool_call_id": "b", "content": "sun"},
    {"role": "tool", "tool_call_id": "unheard", "content": "?"},
]


async def messages_shown(template: str) -> list[dict[str, Any]]:
    """The conversation as the model is shown it."""
    engine = FakeEngine(tool_template=template, max_model_len=4096)
    async with server_url(engine) as url:
        reply = await ask(url, "POST", "/v1/chat/completions", {"messages": CONVERSATION, "temperature": 0})
        assert reply.status == 200
    return engine.messages


async def ids_shown(template: str) -> tuple[list[str], list[str]]:
    """The ids of the calls and of their results, as the model is shown them."""
    messages = await messages_shown(template)
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if message["role"] == "tool"]


async def test_kimi_is_shown_calls_by_their_names_and_places() -> None:
    """Its templates show no name beside the id: with another id it reads a call of nothing it knows."""
    calls, results = await ids_shown(KIMI)
    assert calls == ["functions.weather:0", "functions.clock:1", "functions.weather:2"]
    assert results == ["functions.clock:1", "functions.weather:0", "functions.weather:2", "unheard"]


async def test_newer_templates_of_mistral_are_shown_ids_of_nine_characters() -> None:
    calls, results = await ids_shown(MISTRAL_NAMED)
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in (*calls, *results))
    assert [calls[1], calls[0], calls[2]] == results[:3]


async def test_function_gemma_is_told_whose_result_it_is() -> None:
    """Its templates refuse a result without a name, which OpenAI's clients do not send."""
    messages = await messages_shown(FUNCTION_GEMMA)
    names = [message.get("name") for message in messages if message["role"] == "tool"]
    assert names == ["clock", "weather", "weather", None]
    assert all("name" not in message for message in await messages_shown(MISTRAL_NAMED))


async def test_gpt_oss_is_shown_parallel_calls_one_by_one() -> None:
    """Its templates show the first call of a message, and every result as that one's."""
    messages = await messages_shown(GPT_OSS)
    told = [
        [call["id"] for call in each.get("tool_calls", ())] or each.get("tool_call_id") for each in messages
    ]
    assert told == [None, ["call_a"], "call_a", ["b"], "b", ["b"], "b", "unheard"]
    assert [each["content"] for each in messages if each["role"] == "tool"] == ["rain", "noon", "sun", "?"]
