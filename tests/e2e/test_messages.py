"""/v1/messages over a real socket: the official client, events, errors, what the template is shown."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from engine import DeadlineExceeded, Overloaded, RequestFailed
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import RawReply, Wire, ask
from tests.support import tool_templates
from tests.support.fake_engine import FakeEngine, FakeGrammar
from tests.support.messages_grammar import check_error, check_message, check_messages_stream
from tests.support.named_events import named_events

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def client_of(url: str, key: str = "x") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def engine_of(reply: str | None = None, **fields: Any) -> FakeEngine:
    return FakeEngine(
        tool_template=tool_templates.ALL["hermes"], reply=reply, **{"max_model_len": 4096, **fields}
    )


def body_of(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": HELLO, **fields}


async def post(url: str, body: Any, headers: dict[str, str] | None = None, path: str = PATH) -> RawReply:
    return await ask(url, "POST", path, body, headers)


def shown(engine: FakeEngine) -> list[tuple[object, object]]:
    """What the template was shown last: roles and contents."""
    return [(each["role"], each["content"]) for each in engine.messages]


async def test_a_reply_whole_and_in_a_stream() -> None:
    async with server_url(engine_of("Hello, you.")) as url:
        whole = check_message((await post(url, body_of())).json())
        reply = await post(url, body_of(stream=True))
    events = named_events(reply.body)
    streamed = check_messages_stream(events)
    assert [event.name for event in events[:3]] == ["message_start", "content_block_start", "ping"]
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    for found in (whole, streamed):
        assert found["content"] == [{"type": "text", "text": "Hello, you."}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
        assert found["usage"] == {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 11,
        }
        assert found["id"].startswith("msg_") and found["model"] == MODEL
    assert whole["metrics"] == events[-2].payload["metrics"]


async def test_the_official_client_calls_a_tool_and_answers_it() -> None:
    engine = engine_of(f"Let me see. {CALL}")
    async with server_url(engine) as url, client_of(url) as client:
        whole = await client.messages.create(model=MODEL, max_tokens=200, messages=HELLO, tools=[WEATHER])
        async with client.messages.stream(
            model=MODEL, max_tokens=200, messages=HELLO, tools=[WEATHER]
        ) as stream:
            texts = [text async for text in stream.text_stream]
            joined = await stream.get_final_message()
        assert "".join(texts) == "Let me see."
        for found in (whole, joined):
            text, call = found.content
            assert (found.stop_reason, text.type, call.type) == ("tool_use", "text", "tool_use")
            assert call.type == "tool_use" and call.id.startswith("toolu_")
            assert (call.name, call.input) == ("weather", {"city": "Köln"})
        result: Any = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "rain"}  # type: ignore[union-attr]
        more: Any = [
            *HELLO,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        count = await client.messages.count_tokens(model=MODEL, messages=more, tools=[WEATHER])
        last = await client.messages.create(model=MODEL, max_tokens=200, messages=more, tools=[WEATHER])
    assert count.input_tokens == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    assert shown(engine) == [("user", "hi"), ("assistant", "Let me see."), ("tool", "rain"), ("user", "so?")]
    calls: Any = engine.messages[1]["tool_calls"]
    (made,) = calls
    assert made["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert made["id"] == engine.messages[2]["tool_call_id"]
    assert engine.tools[0]["function"] == {
        "name": "weather",
        "description": "of a city",
        "parameters": CITY,
    }


async def test_the_blocking_client() -> None:
    def use(url: str) -> tuple[Any, str]:
        with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client:
            whole = client.messages.create(model=MODEL, max_tokens=50, messages=HELLO)
            with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
                return whole.content, "".join(stream.text_stream)

    async with server_url(engine_of("Hello."), api_key=("key",)) as url:
        content, text = await asyncio.to_thread(use, url)
    assert (content[0].text, text) == ("Hello.", "Hello.")


async def test_what_the_template_is_shown() -> None:
    engine = engine_of("ok")
    cached = {"cache_control": {"type": "ephemeral"}}
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, document]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "broken", "is_error": True},
            ],
        },
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "c"},
    ]
    system = [{"type": "text", "text": "You help.", **cached}, {"type": "text", "text": "Be kind."}]
    async with server_url(engine) as url:
        reply = await post(url, body_of(messages=messages, system=system, tools=[{**WEATHER, **cached}]))
    assert reply.status == 200, reply.body
    assert shown(engine) == [
        ("system", "You help.\n\nBe kind."),
        ("user", "a\nT\nD"),
        ("assistant", "b"),
        ("tool", "rain"),
        ("tool", "Error: broken"),
        ("system", "Be brief."),
        ("user", "c"),
    ]
    assert reply.headers["x-slipstream-ignored"] == "messages.redacted_thinking"


BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("nonce", ["eb6c6", "0aaa9"])
async def test_the_changing_line_of_claude_code_never_reaches_the_prompt(nonce: str) -> None:
    engine = engine_of("ok")
    line = BILLING.format(nonce)
    head = {"type": "text", "text": "You are an agent."}
    async with server_url(engine) as url:
        await post(url, body_of(system=[{"type": "text", "text": line}, head]))
        assert shown(engine)[0] == ("system", "You are an agent.")
        await post(url, body_of(system=f"{line}\nYou are an agent."))
        assert shown(engine)[0] == ("system", "You are an agent.")
        await post(url, body_of(system=[head, {"type": "text", "text": line}]))  # a text like any other
        assert shown(engine)[0] == ("system", f"You are an agent.\n\n{line}")


@pytest.mark.parametrize(
    ("choice", "most"),
    [
        ({"type": "any"}, 16),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "weather"}, 1),
    ],
)
async def test_a_forced_call_streams_its_arguments(choice: Any, most: int) -> None:
    engine = engine_of(CALL)
    async with server_url(engine) as url:
        reply = await post(url, body_of(tools=[WEATHER], tool_choice=choice, stream=True))
    events = named_events(reply.body)
    message = check_messages_stream(events)
    assert sum(event.payload.get("delta", {}).get("type") == "input_json_delta" for event in events) > 5
    assert (message["stop_reason"], message["content"][0]["input"]) == ("tool_use", {"city": "Köln"})
    grammar = engine.requests[0].grammar
    assert isinstance(grammar, FakeGrammar) and grammar.structure.frame
    assert grammar.structure.frame.most == most


async def test_calls_of_a_strict_tool_match_its_schema_without_being_forced() -> None:
    engine = engine_of(CALL)
    async with server_url(engine) as url:
        for strict in (None, False, True):
            await post(url, body_of(tools=[{**WEATHER, "strict": strict}]))
    *others, grammar = [request.grammar for request in engine.requests]
    assert others == [None, None]
    assert isinstance(grammar, FakeGrammar) and grammar.structure.amid_text
    assert json.loads(grammar.structure.source)["$defs"]["weather"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": NaN, "days": [1, -Infinity]}', {"city": None, "days": [1, None]}),
        ('{"city": 1e999}', {"city": None}),
        ('{"city": "Os\nlo"}', {"city": "Os\nlo"}),
        ("{'city': 'Oslo'}", {}),
    ],
)
async def test_arguments_that_are_no_json_are_read_as_far_as_they_go(
    arguments: str, read: dict[str, Any]
) -> None:
    engine = engine_of(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    async with server_url(engine) as url:
        message = check_message((await post(url, body_of(max_tokens=200, tools=[WEATHER]))).json())
    (call,) = message["content"]
    assert (message["stop_reason"], call["name"], call["input"]) == ("tool_use", "weather", read)


async def test_no_tool_is_shown_when_none_may_be_called() -> None:
    engine = engine_of("ok")
    async with server_url(engine) as url:
        assert (await post(url, body_of(tools=[WEATHER], tool_choice={"type": "none"}))).status == 200
        assert engine.tools == ()
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        reply = await post(url, body_of(tools=[hosted], tool_choice={"type": "auto"}, betas=[1]))
    assert reply.status == 200
    assert set(reply.headers["x-slipstream-ignored"].split(",")) == {"tools.web_search_20250305", "betas"}


async def test_a_form_can_be_asked_for() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    engine = engine_of('{"x": 1}')
    async with server_url(engine) as url:
        for fields in (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"output_format": {"type": "json_schema", "schema": schema}},
        ):
            assert (await post(url, body_of(**fields))).status == 200
            grammar = engine.requests[-1].grammar
            assert isinstance(grammar, FakeGrammar)
            assert json.loads(grammar.structure.source) == {**schema, "additionalProperties": False}


async def test_why_a_message_ends() -> None:
    engine = engine_of("Hello, you.")
    async with server_url(engine) as url:
        short = (await post(url, body_of(max_tokens=5))).json()
        stopped = (await post(url, body_of(stop_sequences=["l"]))).json()
        streamed = check_messages_stream(
            named_events((await post(url, body_of(stop_sequences=["l"], stream=True))).body)
        )
    assert (short["stop_reason"], short["content"][0]["text"]) == ("max_tokens", "Hello")
    for found in (stopped, streamed):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "l")
        assert found["content"][0]["text"] == "He"
    async with server_url(engine_of("Hello, you.", max_model_len=12)) as url:
        cut = (await post(url, body_of(max_tokens=32_000))).json()  # more than there is, as agents ask
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("model_context_window_exceeded", "Hell")


async def test_a_silent_stream_begins_and_pings() -> None:
    release = asyncio.Event()

    async def gate(i: int) -> None:
        await release.wait()

    async with server_url(engine_of("ok", gate=gate), sse_keepalive_seconds=0.01) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", PATH, json.dumps(body_of(stream=True)).encode())
        await wire.head()
        first, then = await wire.chunk(), await wire.chunk()
        release.set()
        rest = await wire.chunks()
        await wire.close()
    assert first.startswith(b"event: message_start\n")
    assert then == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert check_messages_stream(named_events(first + then + b"".join(rest)))["stop_reason"] == "end_turn"


# Errors, each in Anthropic's shape.


async def test_what_is_refused_before_a_route_has_it_has_the_shape_too() -> None:
    async with server_url(engine_of("ok"), api_key=("key",), max_body_bytes=2000) as url:
        key = {"x-api-key": "key"}
        for status, kind, reply in (
            (401, "authentication_error", await post(url, body_of())),
            (401, "authentication_error", await post(url, body_of(), {"x-api-key": "nope"})),
            (404, "not_found_error", await post(url, body_of(), key, f"{PATH}/nope")),
            (405, "not_found_error", await ask(url, "GET", PATH, None, key)),
            (413, "request_too_large", await post(url, body_of(system="x" * 3000), key)),
            (415, "invalid_request_error", await post(url, b"a=b", {**key, "content-type": "text/plain"})),
            (403, "permission_error", await post(url, body_of(), {**key, "origin": "http://evil.example"})),
            (404, "not_found_error", await post(url, body_of(model="nope"), key)),
            (400, "invalid_request_error", await post(url, b"{", key)),
        ):
            assert (reply.status, check_error(reply.json())["type"]) == (status, kind)
            assert reply.json()["request_id"] == reply.headers["request-id"]
        assert "error" in (await ask(url, "POST", "/v1/chat/completions", {})).json()  # OpenAI's stays so


async def test_a_key_comes_in_either_header_but_never_in_two_ways() -> None:
    async with server_url(engine_of("ok"), api_key=("one", "two")) as url:
        for headers, status in (
            ({"x-api-key": "one"}, 200),
            ({"authorization": "Bearer two"}, 200),
            ({"authorization": "Bearer one", "x-api-key": "one"}, 200),
            ({"authorization": "Bearer one", "x-api-key": "two"}, 401),
            ({"authorization": "Basic one", "x-api-key": "one"}, 401),
            ({"x-api-key": ""}, 401),
        ):
            assert (await post(url, body_of(), headers)).status == status, headers
        assert (await ask(url, "GET", "/v1/models", None, {"x-api-key": "one"})).status == 200


async def test_the_engines_errors() -> None:
    engine = engine_of("Hello", failure=RequestFailed("it broke", "forward"))
    async with server_url(engine) as url:
        early = await post(url, body_of(stream=True))
        engine.fail_at = 3
        late = named_events((await post(url, body_of(stream=True))).body)
        engine.failure, engine.refusal = None, Overloaded("full", code="queue_full", retry_after_s=7)
        full = await post(url, body_of())
        counted = await post(url, {"messages": HELLO}, path=COUNT)
        engine.refusal = DeadlineExceeded("too late")
        too_late = await post(url, body_of())
    assert (early.status, check_error(early.json())["type"]) == (500, "api_error")
    assert late[-1].name == "error" and "it broke" in check_error(late[-1].payload)["message"]
    assert (full.status, full.headers["retry-after"]) == (529, "7")
    assert check_error(full.json())["type"] == check_error(counted.json())["type"] == "overloaded_error"
    assert (too_late.status, check_error(too_late.json())["type"]) == (504, "timeout_error")


async def test_the_official_client_raises_its_own_errors() -> None:
    engine = engine_of("Hello", failure=RequestFailed("it broke", "forward"), fail_at=3)
    async with server_url(engine) as url, client_of(url) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5006 tokens > 4096 maximum"):
            long: Any = [{"role": "user", "content": "x" * 5000}]
            await client.messages.create(model=MODEL, max_tokens=1, messages=long)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="nope", max_tokens=1, messages=HELLO)
        assert missing.value.request_id
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
                async for _ in stream:
                    pass
        engine.refusal = Overloaded("full", code="queue_full")
        with pytest.raises(anthropic.APIStatusError) as full:
            await client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
        assert full.value.status_code == 529
    async with server_url(engine, api_key=("key",)) as url, client_of(url, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no length": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    "an image": (user({"type": "image", "source": {}}), "messages[0].content[0]"),
    "a PDF": (user({"type": "document", "source": {"type": "base64"}}), "messages[0].content[0]"),
    "an image that a tool gave": (
        user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        "messages[0].content[0].content",
    ),
    "a type that is none": (user({"type": {}}), "messages[0].content[0]"),
    "a message that has begun": (
        {"messages": [*HELLO, {"role": "assistant", "content": "Well"}]},
        "'messages' ends with the assistant's",
    ),
    "a tool twice": ({"tools": [WEATHER, WEATHER]}, "more than one tool named 'weather'"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "an unknown choice": ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    "a nameless choice": ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a choice of nothing": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a schema that cannot be": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"const": "refuse me"}}}},
        "output_config.format.schema",
    ),
    "a template's refusal": (user({"type": "text", "text": "refuse me"}), "refused these messages"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_named(case: str) -> None:
    fields, named = REFUSED[case]
    engine = engine_of("ok")
    async with server_url(engine) as url:
        reply = await post(url, body_of(**fields))
    error = check_error(reply.json())
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert named in error["message"]
    assert not engine.requests


# Thinking.


async def test_thoughts_are_a_block_and_reach_the_template_again() -> None:
    engine = engine_of("<think>\nSo.\n</think>\n\nYes.", reasoning="qwen3")
    async with server_url(engine) as url, client_of(url) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        message = await client.messages.create(model=MODEL, max_tokens=90, messages=HELLO, thinking=thinking)
        assert engine.options["enable_thinking"] is True
        assert engine.requests[0].grammar is not None  # ends what is thought when the budget is spent
        async with client.messages.stream(
            model=MODEL, max_tokens=90, messages=HELLO, thinking={"type": "adaptive"}
        ) as stream:
            events = [event.type async for event in stream]
            joined = await stream.get_final_message()
        assert "thinking" in events and "signature" in events
        for found in (message, joined):
            thought, text = found.content
            assert thought.type == "thinking" and thought.thinking == "So." and thought.signature
            assert text.type == "text" and text.text == "Yes."
            assert found.usage.output_tokens_details and found.usage.output_tokens_details.thinking_tokens > 0
        more: Any = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
        await client.messages.create(model=MODEL, max_tokens=90, messages=more, thinking={"type": "disabled"})
        assert engine.messages[1]["reasoning_content"] == "So."
        assert engine.options["enable_thinking"] is False
        hidden: Any = {"type": "adaptive", "display": "omitted"}
        omitted = await client.messages.create(model=MODEL, max_tokens=90, messages=HELLO, thinking=hidden)
        assert omitted.content[0].type == "thinking" and omitted.content[0].thinking == ""
