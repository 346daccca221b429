"""/v1/responses over a real socket: the official client, the events, what is stored, what is refused."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from engine import DeadlineExceeded, Overloaded, RequestFailed, TemplateStopped
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import RawReply, Wire, ask
from tests.support import tool_templates
from tests.support.fake_engine import FakeEngine, FakeGrammar
from tests.support.named_events import named_events
from tests.support.responses_grammar import check_response, check_responses_stream

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "so?"}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY}
GREP: Any = {"type": "custom", "name": "grep", "description": "finds text"}


def client_of(url: str, key: str = "x") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def engine_of(reply: str | None = None, **fields: Any) -> FakeEngine:
    return FakeEngine(
        tool_template=tool_templates.ALL["hermes"], reply=reply, **{"max_model_len": 4096, **fields}
    )


async def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> RawReply:
    return await ask(url, "POST", PATH, body, headers)


def shown(engine: FakeEngine) -> list[tuple[object, object]]:
    """What the template was shown last: roles and contents."""
    return [(each["role"], each["content"]) for each in engine.messages]


async def test_a_response_tells_how_it_was_sampled() -> None:
    """As asked for, else as the model's makers advise, else by the API's own defaults."""
    async with server_url(engine_of("x", default_sampling={"temperature": 0.2})) as url:
        silent = (await post(url, {"input": "hi"})).json()
        asked = (await post(url, {"input": "hi", "temperature": 0.7, "top_p": 0.5})).json()
    assert (silent["temperature"], silent["top_p"]) == (0.2, 1.0)
    assert (asked["temperature"], asked["top_p"]) == (0.7, 0.5)


async def test_a_reply_whole_and_in_a_stream() -> None:
    async with server_url(engine_of("Hello, you.")) as url:
        whole = check_response((await post(url, {"input": "hi"})).json())
        reply = await post(url, {"input": "hi", "stream": True})
        streamed = check_responses_stream(named_events(reply.body))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    for found in (whole, streamed):
        (item,) = found["output"]
        assert (item["role"], item["content"][0]["text"]) == ("assistant", "Hello, you.")
        assert (found["status"], found["error"], found["incomplete_details"]) == ("completed", None, None)
        assert found["usage"] == {
            "input_tokens": 8,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 11,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 19,
        }
        assert found["metrics"]["queue_time_ms"] == 1.0
        assert found["id"].startswith("resp_") and item["id"].startswith("msg_")


async def test_the_official_client_calls_a_tool_and_answers_it() -> None:
    engine = engine_of(f"Let me see. {CALL}")
    strict_tools: Any = [{**WEATHER, "strict": True}]
    async with server_url(engine) as url, client_of(url) as client:
        first = await client.responses.create(model=MODEL, input="hi", tools=[WEATHER])
        async with client.responses.stream(model=MODEL, input="hi", tools=strict_tools) as stream:
            async for _ in stream:
                pass
            joined = await stream.get_final_response()
        message, call = first.output
        assert message.type == "message" and call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln"})
        assert [item.type for item in joined.output] == ["message", "function_call"]
        given: Any = [
            {"role": "user", "content": "hi"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        await client.responses.create(model=MODEL, input=given, tools=[WEATHER])
    user, assistant, tool = engine.messages
    assert (user["content"], tool["content"], tool["tool_call_id"]) == ("hi", "rain", call.call_id)
    assert assistant["content"] == "Let me see."
    calls: Any = assistant["tool_calls"]
    assert calls[0]["function"] == {"name": "weather", "arguments": {"city": "Köln"}}


async def test_the_blocking_client_reads_a_stream_and_parses() -> None:
    class Point(BaseModel):
        x: int

    def use(url: str) -> tuple[str, Any, list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            parsed = client.responses.parse(model=MODEL, input="hi", text_format=Point)
            stream = client.responses.create(model=MODEL, input="hi", stream=True)
            return parsed.output_text, parsed.output_parsed, [event.type for event in stream]

    engine = engine_of('{"x": 3}')
    async with server_url(engine) as url:
        text, point, events = await asyncio.to_thread(use, url)
    assert (text, point.x) == ('{"x": 3}', 3)
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    grammar = engine.requests[0].grammar
    assert isinstance(grammar, FakeGrammar)
    assert json.loads(grammar.structure.source)["properties"]["x"]["type"] == "integer"


async def test_what_the_template_is_shown() -> None:
    engine = engine_of("ok")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "grep", "input": "x y"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "no"}],
        },
        {"role": "developer", "content": "Be brief now."},
        {"role": "user", "content": "c"},
    ]
    async with server_url(engine) as url:
        body = {"input": items, "instructions": "You help.", "tools": [WEATHER, GREP]}
        reply = await post(url, body)
    assert reply.status == 200, reply.body
    assert shown(engine) == [
        ("system", "You help.\n\nBe kind."),
        ("user", "a\nb"),
        ("assistant", "Yes."),
        ("tool", "rain"),
        ("tool", "no"),
        ("system", "Be brief now."),
        ("user", "c"),
    ]
    calls: Any = engine.messages[2]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": {}},
        {"name": "grep", "arguments": {"input": "x y"}},
    ]
    shown_tools: Any = engine.tools
    assert [tool["function"]["name"] for tool in shown_tools] == ["weather", "grep"]


class StrictTemplate(FakeEngine):
    """Its template takes a system message in the first place only."""

    async def render_chat(self, messages: Any, tools: Any = (), **more: Any) -> list[int]:
        if any(message["role"] == "system" for message in messages[1:]):
            messages = [*messages, {"role": "user", "content": "refuse me"}]
        return await super().render_chat(messages, tools, **more)


async def test_a_developer_anywhere_is_heard_by_a_strict_template() -> None:
    engine = StrictTemplate(reply="ok")
    items = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}]
    async with server_url(engine) as url:
        assert (await post(url, {"input": items, "instructions": "c"})).status == 200
        assert shown(engine) == [("system", "c"), ("user", "a"), ("user", "b")]
        refused = await post(url, {"input": "refuse me"})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "input")


class TakesTurns(FakeEngine):
    """As Mistral's and Gemma's templates: one system message, then the user and the assistant by turns."""

    async def render_chat(self, messages: Any, tools: Any = (), **more: Any) -> list[int]:
        counted = [each for each in messages if each["role"] != "tool" and not each.get("tool_calls")]
        roles = [message["role"] for message in counted]
        turns = roles[roles[:1] == ["system"] :]
        if turns != [("user", "assistant")[i % 2] for i in range(len(turns))]:
            messages = [*messages, {"role": "user", "content": "refuse me"}]
        return await super().render_chat(messages, tools, **more)


async def test_several_messages_of_the_user_are_one_where_roles_take_turns() -> None:
    """Codex begins with two of them, and Claude Code with a system message behind the user's."""
    engine = TakesTurns(reply="ok")
    items = [
        {"role": role, "content": role[0]} for role in ("user", "developer", "user", "assistant", "user")
    ]
    async with server_url(engine) as url:
        assert (await post(url, {"input": [*items, items[0]], "instructions": "c"})).status == 200
        assert shown(engine) == [
            ("system", "c"),
            ("user", "u\n\nd\n\nu"),
            ("assistant", "a"),
            ("user", "u\n\nu"),
        ]
        refused = await post(url, {"input": items[3:4]})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "input")


class CostlyTemplate(FakeEngine):
    """Its template takes too long for any conversation."""

    async def render_chat(self, messages: Any, tools: Any = (), **more: Any) -> list[int]:
        await super().render_chat(messages, tools, **more)
        raise TemplateStopped("the chat template was stopped", param="messages")


async def test_a_template_that_was_stopped_is_not_tried_with_other_messages() -> None:
    """It holds the thread that tokenizes for all, up to its limit, each time."""
    engine = CostlyTemplate()
    async with server_url(engine) as url:
        items = [USER, {"role": "developer", "content": "b"}, USER]
        reply = await post(url, {"input": items})
    assert (reply.status, reply.json()["error"]["param"], engine.num_encoded) == (400, "input", 1)


async def test_what_the_user_says_behind_a_result_is_shown_behind_an_answer_where_roles_take_turns() -> None:
    """Agents put notes beside results, and users speak while tools run: Mistral's templates take neither."""
    engine = TakesTurns(reply="ok", tool_template=tool_templates.ALL["hermes"])
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "rain"}
    async with server_url(engine) as url:
        assert (await post(url, {"input": [USER, call, result, USER, USER]})).status == 200
        called = [("user", "so?"), ("assistant", ""), ("tool", "rain")]
        assert shown(engine) == [*called, ("assistant", " "), ("user", "so?\n\nso?")]
        assert (await post(url, {"input": [USER, call, result]})).status == 200
        assert shown(engine) == called


async def test_calls_of_custom_and_grouped_tools_come_back_as_such() -> None:
    calls = [
        {"name": "grep", "arguments": {"input": 'a "b"\n'}},
        {"name": "crm__find", "arguments": {"id": 1}},
    ]
    reply = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    crm = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]}
    engine = engine_of(reply)
    async with server_url(engine) as url:
        body = {"input": "hi", "tools": [GREP, crm], "stream": True}
        response = check_responses_stream(named_events((await post(url, body)).body))
        custom, function = response["output"]
        again = {"input": [*response["output"], {"role": "user", "content": "go on"}], "tools": [GREP, crm]}
        assert (await post(url, again)).status == 200
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "grep", 'a "b"\n')
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "find", "crm")
    shown_calls: Any = engine.messages[0]["tool_calls"]
    assert [call["function"] for call in shown_calls] == calls


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("{'city': 'Oslo'}", {}),
        ('{"city": "Oslo",}', {}),
        ('{"city": "\\ud800"}', {"city": "?"}),
        ('{"city": "Os\nlo"}', {"city": "Os\nlo"}),
        ('{"city": NaN, "days": 2}', {"city": None, "days": 2}),
    ],
)
async def test_a_call_whose_arguments_are_no_json_is_told_stored_and_continued(
    arguments: str, read: dict[str, Any]
) -> None:
    """Models write such; clients see them as they are, and the conversation goes on."""
    engine = engine_of(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    async with server_url(engine) as url:
        body = {"input": "hi", "tools": [WEATHER]}
        whole = check_response((await post(url, body)).json())
        reply = await post(url, {**body, "stream": True})
        streamed = check_responses_stream(named_events(reply.body))
        for found in (whole, streamed):
            (call,) = found["output"]
            assert (found["status"], call["arguments"]) == ("completed", arguments)
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}
            again = {"input": [output], "previous_response_id": found["id"]}
            assert (await post(url, again)).status == 200
            shown_calls: Any = engine.messages[1]["tool_calls"]
            assert shown_calls[0]["function"] == {"name": "weather", "arguments": read}


async def test_a_custom_tool_shows_its_grammar_and_a_forced_one_follows_a_regular_expression() -> None:
    lark = {**GREP, "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}}
    regex = {**GREP, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
    engine = engine_of("ok")
    async with server_url(engine) as url:
        await post(url, {"input": "hi", "tools": [lark]})
        shown_tools: Any = engine.tools
        assert "start: WORD" in shown_tools[0]["function"]["description"]
        choice = {"type": "custom", "name": "grep"}
        reply = await post(url, {"input": "hi", "tools": [regex], "tool_choice": choice})
        assert reply.json()["tool_choice"] == choice
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, FakeGrammar)
    found = json.loads(grammar.structure.source)["$defs"]["grep"]["properties"]["input"]
    assert found == {"type": "string", "pattern": "^(?:[a-z]+)$"}


async def test_hosted_tools_and_their_items_are_skipped_and_named() -> None:
    engine = engine_of("ok")
    body = {
        "input": [
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"role": "user", "content": "a"},
        ],
        "tools": [{"type": "web_search"}, WEATHER, {"type": "mcp", "server_label": "x"}],
        "text": {"verbosity": "low"},
        "shiny": 1,
    }
    async with server_url(engine) as url:
        reply = await post(url, body)
        only = await post(url, {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "auto"})
    assert [tool["name"] for tool in check_response(reply.json())["tools"]] == ["weather"]
    ignored = set(reply.headers["x-slipstream-ignored"].split(","))
    assert ignored == {"shiny", "tools.web_search", "tools.mcp", "input.web_search_call", "text.verbosity"}
    assert (only.status, only.json()["tools"]) == (200, [])
    async with server_url(engine_of("ok"), strict_params=True) as url:
        assert (await post(url, {"input": "a", "tools": [{"type": "web_search"}]})).status == 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_forced_call_streams_its_arguments(choice: Any) -> None:
    async with server_url(engine_of(CALL)) as url:
        body = {"input": "hi", "tools": [WEATHER], "tool_choice": choice, "stream": True}
        events = named_events((await post(url, body)).body)
    response = check_responses_stream(events)
    assert sum(event.name == "response.function_call_arguments.delta" for event in events) > 5
    assert json.loads(response["output"][0]["arguments"]) == {"city": "Köln"}


async def test_only_allowed_tools_may_be_called() -> None:
    engine = engine_of("ok")
    clock = {"type": "function", "name": "clock"}
    async with server_url(engine) as url:
        choice = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "clock"}],
        }
        reply = await post(url, {"input": "hi", "tools": [WEATHER, clock], "tool_choice": choice})
    assert check_response(reply.json())["tool_choice"] == choice
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, FakeGrammar)
    assert set(json.loads(grammar.structure.source)["$defs"]) == {"clock"}


async def test_a_choice_names_the_tool_of_no_group_before_one_of_a_group() -> None:
    engine = engine_of("ok")
    crm = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "weather"}]}
    named = {"type": "function", "name": "weather"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    async with server_url(engine) as url:
        for choice in (named, allowed):
            body = {"input": "hi", "tools": [crm, WEATHER], "tool_choice": choice}
            assert (await post(url, body)).status == 200
            grammar = engine.requests[-1].grammar
            assert isinstance(grammar, FakeGrammar)
            assert set(json.loads(grammar.structure.source)["$defs"]) == {"weather"}


async def test_a_reply_that_is_cut_is_incomplete() -> None:
    async with server_url(engine_of("Hello, you.")) as url:
        whole = check_response((await post(url, {"input": "hi", "max_output_tokens": 5})).json())
        reply = await post(url, {"input": "hi", "max_output_tokens": 5, "stream": True})
        streamed = check_responses_stream(named_events(reply.body))
    for found in (whole, streamed):
        assert (found["status"], found["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        (item,) = found["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello")


async def test_a_fault_before_the_first_token_is_a_status_and_later_the_last_event() -> None:
    engine = engine_of("Hello", failure=RequestFailed("it broke", "forward"))
    async with server_url(engine) as url:
        early = await post(url, {"input": "hi", "stream": True})
        engine.fail_at = 3
        late = await post(url, {"input": "hi", "stream": True})
        response = check_responses_stream(named_events(late.body))
        stored = await ask(url, "GET", f"{PATH}/{response['id']}")
    assert (early.status, early.json()["error"]["code"]) == (500, "forward_failed")
    assert (late.status, response["status"], response["error"]["code"]) == (200, "failed", "server_error")
    assert "it broke" in response["error"]["message"]
    assert stored.json() == response


async def test_log_probabilities_come_with_the_text() -> None:
    async with server_url(engine_of("Hey")) as url:
        body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = check_response((await post(url, body)).json())
        streamed = check_responses_stream(named_events((await post(url, {**body, "stream": True})).body))
        plain = (await post(url, {"input": "hi", "top_logprobs": 2})).json()
    for found in (whole, streamed):
        logprobs = found["output"][0]["content"][0]["logprobs"]
        assert [each["token"] for each in logprobs] == ["H", "e", "y"]
        assert len(logprobs[0]["top_logprobs"]) == 2
    assert plain["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("tokens_at_once", [1, 7, 100])
async def test_log_probabilities_are_those_of_the_text_however_many_tokens_come_at_once(
    tokens_at_once: int,
) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"]}
    engine = engine_of("<think>Hm.</think>Grüße.", reasoning="qwen3", merge=tokens_at_once)
    async with server_url(engine) as url:
        whole = check_response((await post(url, body)).json())
        streamed = check_responses_stream(named_events((await post(url, {**body, "stream": True})).body))
    for found in (whole, streamed):
        logprobs = found["output"][1]["content"][0]["logprobs"]
        assert "".join(each["token"] for each in logprobs) == "Grüße."


@pytest.mark.parametrize("num_tokens", [800, pytest.param(4000, marks=pytest.mark.slow)])
async def test_many_log_probabilities_are_written_in_pieces(num_tokens: int) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20}
    async with server_url(engine_of("abcdefgh" * (num_tokens // 8), merge=8)) as url:
        whole = await post(url, body)
        stored = await ask(url, "GET", f"{PATH}/{whole.json()['id']}")
        wire = await Wire.connect(url)
        await wire.send("POST", PATH, json.dumps({**body, "stream": True}).encode())
        await wire.head()
        chunks = await wire.chunks()
        await wire.close()
    assert whole.headers["transfer-encoding"] == "chunked"
    assert stored.json() == whole.json()
    last = named_events(b"".join(chunks))[-1].payload["response"]
    for found in (whole.json(), last):
        assert len(found["output"][0]["content"][0]["logprobs"]) == num_tokens
    assert max(map(len, chunks)) < 1 << 18


async def test_a_tool_is_said_to_be_strict_where_its_calls_are_held_to_its_schema() -> None:
    engine = engine_of(CALL)
    async with server_url(engine) as url:
        for asked in ({}, {"strict": None}, {"strict": False}, {"strict": True}):
            found = check_response((await post(url, {"input": "hi", "tools": [WEATHER | asked]})).json())
            assert found["tools"][0]["strict"] is (engine.requests[-1].grammar is not None), asked


# What is stored.


async def test_a_conversation_goes_on_from_what_is_stored() -> None:
    engine = engine_of("ok")
    async with server_url(engine) as url, client_of(url) as client:
        first = await client.responses.create(model=MODEL, input="a", instructions="once")
        second = await client.responses.create(model=MODEL, input="b", previous_response_id=first.id)
        assert shown(engine) == [("user", "a"), ("assistant", "ok"), ("user", "b")]
        assert second.previous_response_id == first.id
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        await client.responses.create(model=MODEL, input="c", previous_response_id=second.id)
        assert len(engine.messages) == 5  # what it was made from is still known
        again = await client.responses.retrieve(second.id)
        assert again.model_dump() == second.model_dump()
        reference: Any = [
            {"type": "item_reference", "id": second.output[0].id},
            {"role": "user", "content": "d"},
        ]
        await client.responses.create(model=MODEL, input=reference)
        assert shown(engine) == [("assistant", "ok"), ("user", "d")]


async def test_what_is_not_stored_is_not_found() -> None:
    async with server_url(engine_of("ok")) as url:
        unstored = (await post(url, {"input": "a", "store": False})).json()
        assert unstored["store"] is False
        for name in (unstored["id"], "resp_nope"):
            assert (await ask(url, "GET", f"{PATH}/{name}")).json()["error"]["code"] == "response_not_found"
            assert (await ask(url, "DELETE", f"{PATH}/{name}")).status == 404
            reply = await post(url, {"input": "b", "previous_response_id": name})
            error = reply.json()["error"]
            assert (reply.status, error["code"]) == (400, "previous_response_not_found")
            assert error["param"] == "previous_response_id"
        missing = await post(url, {"input": [{"type": "item_reference", "id": "msg_nope"}]})
        assert (missing.status, missing.json()["error"]["param"]) == (400, "input")


async def test_a_long_item_that_is_referred_to_often_is_refused_before_its_copies_are_made() -> None:
    async with server_url(engine_of("x" * 4000, max_model_len=8192)) as url:
        (said,) = (await post(url, {"input": "hi"})).json()["output"]
        reference = {"type": "item_reference", "id": said["id"]}
        assert (await post(url, {"input": [reference] * 2})).status == 200
        body = {"input": [reference] * 8000}
        await post(url, body)  # what is made once, the first time, does not count
        tracemalloc.start()
        reply = await post(url, body)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
    assert most_bytes < 8000 * 4000 / 2


async def test_only_the_key_that_made_a_response_finds_it() -> None:
    async with server_url(engine_of("ok"), api_key=("one", "two")) as url:
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        made = (await post(url, {"input": "a"}, one)).json()
        name, item = made["id"], made["output"][0]["id"]
        assert (await ask(url, "GET", f"{PATH}/{name}", None, two)).status == 404
        assert (await ask(url, "DELETE", f"{PATH}/{name}", None, two)).status == 404
        assert (await post(url, {"input": "b", "previous_response_id": name}, two)).status == 400
        assert (await post(url, {"input": [{"type": "item_reference", "id": item}]}, two)).status == 400
        assert (await ask(url, "GET", f"{PATH}/{name}", None, one)).status == 200
        gone = await ask(url, "DELETE", f"{PATH}/{name}", None, one)
        assert gone.json() == {"id": name, "object": "response", "deleted": True}


async def test_the_oldest_response_makes_room() -> None:
    async with server_url(engine_of("ok"), max_stored_responses=2) as url:
        names = [(await post(url, {"input": "a"})).json()["id"] for _ in range(2)]
        await post(url, {"input": "b", "previous_response_id": names[0]})  # is as new as what follows it
        found = [(await ask(url, "GET", f"{PATH}/{name}")).status for name in names]
    assert found == [200, 404]
    async with server_url(engine_of("ok"), max_stored_responses=0) as url:
        reply = (await post(url, {"input": "a"})).json()
        assert reply["store"] is False
        assert (await ask(url, "GET", f"{PATH}/{reply['id']}")).status == 404


# What is refused.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"input": None}, "input"),
    "an empty list": ({"input": []}, "input"),
    "a number": ({"input": 5}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    "a file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
    "a type that is none": ({"input": [{"type": []}]}, "input[0].type"),
    "a part whose type is none": (
        {"input": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]},
        "input[0].content",
    ),
    "an unknown role": ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
    "no JSON in a call": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{a"}]},
        "input[0].arguments",
    ),
    "background": ({"background": True}, "background"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "a name twice": ({"tools": [WEATHER, WEATHER]}, "tools"),
    "a bad name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    "an unknown choice": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
    ),
    "a hosted choice": ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice"),
    "a schema that cannot be": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": "refuse me"}}}},
        "text.format.schema",
    ),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "too much": ({"max_output_tokens": 5000}, "max_output_tokens"),
    "a long input": ({"input": "x" * 5000}, "input"),
    "too many log-probabilities": (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
        "top_logprobs",
    ),
    "a bool as a string": ({"stream": "yes"}, "stream"),
    "too much metadata": ({"metadata": {"a": "x" * 513}}, "metadata"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_named(case: str) -> None:
    fields, param = REFUSED[case]
    engine = engine_of("ok")
    async with server_url(engine) as url:
        reply = await post(url, {"input": "hi", **fields})
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert not engine.requests


async def test_other_refusals_are_those_of_every_path() -> None:
    engine = engine_of("ok")
    async with server_url(engine) as url:
        assert (await post(url, {"input": "a", "model": "nope"})).json()["error"]["code"] == "model_not_found"
        engine.refusal = Overloaded("full", code="queue_full", retry_after_s=7)
        full = await post(url, {"input": "a"})
        engine.refusal = DeadlineExceeded("too late")
        late = await post(url, {"input": "a"})
    assert (full.status, full.headers["retry-after"], late.status) == (503, "7", 504)


async def test_a_client_that_leaves_ends_its_request() -> None:
    engine = engine_of(max_model_len=1_000_000)
    async with server_url(engine) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", PATH, json.dumps({"input": "hi", "stream": True}).encode())
        await wire.head()
        await wire.chunk()
        await wire.close()
        await asyncio.wait_for(engine.streams[0].closed.wait(), 2)


async def test_a_silent_stream_says_first_that_there_is_a_response() -> None:
    release = asyncio.Event()

    async def gate(i: int) -> None:
        await release.wait()

    async with server_url(engine_of("ok", gate=gate), sse_keepalive_seconds=0.01) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", PATH, json.dumps({"input": "hi", "stream": True}).encode())
        await wire.head()
        first, then = await wire.chunk(), await wire.chunk()
        release.set()
        rest = await wire.chunks()
        await wire.close()
    assert first.startswith(b"event: response.created\n") and then == b": keep-alive\n\n"
    assert check_responses_stream(named_events(first + b"".join(rest)))["status"] == "completed"


# Reasoning.


async def test_thoughts_are_an_item_and_reach_the_template_again() -> None:
    engine = engine_of("<think>\nSo.\n</think>\n\nYes.", reasoning="qwen3")
    include = ["reasoning.encrypted_content"]
    async with server_url(engine) as url:
        body = {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}, "include": include}
        whole = check_response((await post(url, body)).json())
        assert engine.options == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
        streamed = check_responses_stream(named_events((await post(url, {**body, "stream": True})).body))
        for found in (whole, streamed):
            thought, message = found["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "So."}]
            assert (thought["type"], thought["summary"]) == ("reasoning", [])
            assert message["content"][0]["text"] == "Yes."
            assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
            assert found["reasoning"] == {"effort": "low", "summary": "auto"}
        bare = {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")}
        for again in (thought, bare):  # some clients give only the encrypted form back
            await post(
                url, {"input": [{"role": "user", "content": "hi"}, again, message, USER], "store": False}
            )
            assert engine.messages[1]["reasoning_content"] == "So."
        await post(url, {"input": "hi", "previous_response_id": whole["id"], "reasoning": {"effort": "none"}})
        assert engine.messages[1]["reasoning_content"] == "So."
        assert engine.options["enable_thinking"] is False


async def test_a_form_holds_behind_the_thoughts_and_a_cut_thought_is_incomplete() -> None:
    engine = engine_of("<think>\nSo.\n</think>\n\n{}", reasoning="qwen3")
    async with server_url(engine) as url:
        reply = await post(url, {"input": "hi", "text": {"format": {"type": "json_object"}}})
        cut = await post(url, {"input": "hi", "max_output_tokens": 10, "stream": True})
    assert [item["type"] for item in check_response(reply.json())["output"]] == ["reasoning", "message"]
    (thought,) = check_responses_stream(named_events(cut.body))["output"]
    assert (thought["type"], thought["status"], thought["content"][0]["text"]) == (
        "reasoning",
        "incomplete",
        "So",
    )
