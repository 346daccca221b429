"""Tool calling over a real socket: the official client and the wire, each family, read and forced."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from engine import StructuredOutput
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import ask, events_of
from tests.support import tool_templates
from tests.support.fake_engine import FakeEngine, FakeGrammar

PATH = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}

CALL = '{"name": "weather", "%s": {"city": "Köln"}}'
REPLIES = {
    "hermes": f"<tool_call>\n{CALL % 'arguments'}\n</tool_call>",
    "llama": CALL % "parameters",
    "mistral": f"[TOOL_CALLS][{CALL % 'arguments'}]",
}


def engine_of(family: str, reply: str | None = None) -> FakeEngine:
    return FakeEngine(
        tool_template=tool_templates.ALL[family], reply=reply or REPLIES[family], max_model_len=4096
    )


def body_of(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tools": TOOLS, "temperature": 0, **fields}


@pytest.mark.parametrize("family", REPLIES)
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
async def test_the_official_client_gets_the_same_call_in_a_stream_and_whole(family: str, choice: Any) -> None:
    reason = "stop" if choice is NAMED else "tool_calls"
    async with (
        server_url(engine_of(family)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        messages: Any = HELLO
        whole = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice
        )
        async with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice
        ) as stream:
            async for _ in stream:
                pass
            joined = await stream.get_final_completion()
    for found in (whole, joined):
        message = found.choices[0].message
        assert found.choices[0].finish_reason == reason
        assert not message.content
        (call,) = message.tool_calls or []
        assert call.type == "function" and call.id.startswith("call_")
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Köln"}


async def test_the_blocking_client_can_answer_a_call() -> None:
    def use(url: str) -> list[Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            messages: list[Any] = list(HELLO)
            first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            (call,) = first.choices[0].message.tool_calls or []
            messages.append(first.choices[0].message)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
            client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            return [call.id]

    engine = engine_of("mistral")
    async with server_url(engine) as url:
        (call_id,) = await asyncio.to_thread(use, url)
    user, assistant, tool = engine.messages
    calls: Any = assistant["tool_calls"]
    (call,) = calls
    assert user == HELLO[0]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    # The family's templates take ids of nine characters only.
    assert call["id"] == tool["tool_call_id"] != call_id and len(call["id"]) == 9 and call["id"].isalnum()


async def test_the_stream_s_events() -> None:
    reply = f"Let me see. {REPLIES['hermes']}"
    async with server_url(engine_of("hermes", reply)) as url:
        events = events_of((await ask(url, "POST", PATH, body_of(stream=True))).body)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    assert calls[0].pop("id").startswith("call_")
    assert calls[0] == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Köln"}'
    assert len(calls) > 5 and all(set(call) == {"index", "function"} for call in calls[1:])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas[-1] == {}


async def test_forced_arguments_stream_as_they_are_written() -> None:
    async with server_url(engine_of("hermes")) as url:
        body = body_of(stream=True, tool_choice="required")
        events = events_of((await ask(url, "POST", PATH, body)).body)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert calls[0] == {"name": "weather", "arguments": ""}
    assert len(calls) > 5
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Köln"}


@pytest.mark.parametrize(
    "reply", ["plain text", "<tool_call>{broken}</tool_call>", '<tool_call>{"name": "weather"', "a <tool_"]
)
async def test_what_is_no_call_is_content(reply: str) -> None:
    async with server_url(engine_of("hermes", reply)) as url:
        whole = (await ask(url, "POST", PATH, body_of())).json()["choices"][0]
        events = events_of((await ask(url, "POST", PATH, body_of(stream=True))).body)
    assert whole["message"] == {"role": "assistant", "content": reply, "refusal": None}
    assert whole["finish_reason"] == "stop"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == reply


async def test_calls_are_parallel_unless_refused() -> None:
    async with server_url(engine_of("hermes", REPLIES["hermes"] * 2)) as url:
        both = (await ask(url, "POST", PATH, body_of())).json()["choices"][0]["message"]["tool_calls"]
        one = (await ask(url, "POST", PATH, body_of(parallel_tool_calls=False))).json()
    assert len({call["id"] for call in both}) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_reply_that_is_cut_ends_for_its_length() -> None:
    async with server_url(engine_of("llama")) as url:
        whole = (await ask(url, "POST", PATH, body_of(max_tokens=9))).json()["choices"][0]
        forced = (await ask(url, "POST", PATH, body_of(max_tokens=43, tool_choice="required"))).json()
    assert (whole["message"]["content"], whole["finish_reason"]) == ("", "length")
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": '}
    assert forced["choices"][0]["finish_reason"] == "length"


async def test_choices_are_read_each_for_itself_and_logprobs_cover_calls() -> None:
    reply = REPLIES["hermes"]
    async with server_url(engine_of("hermes")) as url:
        whole = (await ask(url, "POST", PATH, body_of(n=2, logprobs=True))).json()["choices"]
        events = events_of((await ask(url, "POST", PATH, body_of(n=2, logprobs=True, stream=True))).body)
    for choice in whole:
        assert len(choice["message"]["tool_calls"]) == 1
        assert len(choice["logprobs"]["content"]) == len(reply)
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        tokens = [each["token"] for one in mine if one["logprobs"] for each in one["logprobs"]["content"]]
        assert "".join(tokens) == reply
        assert sum("tool_calls" in one["delta"] for one in mine) > 2


async def test_what_reaches_the_template_and_the_grammar() -> None:
    engine = engine_of("hermes")
    async with server_url(engine) as url:
        await ask(url, "POST", PATH, body_of())
        assert [tool["function"] for tool in engine.tools] == [
            WEATHER["function"],
            {"name": "clock", "parameters": {"type": "object", "properties": {}}},
        ]
        assert engine.requests[-1].grammar is None
        await ask(url, "POST", PATH, body_of(tool_choice="none"))
        assert engine.tools == ()
        await ask(url, "POST", PATH, body_of(tool_choice="required"))
        await ask(url, "POST", PATH, body_of(tool_choice=NAMED))
    grammars = [request.grammar for request in engine.requests[-2:]]
    assert isinstance(grammars[0], FakeGrammar) and isinstance(grammars[1], FakeGrammar)
    required, named = grammars[0].structure, grammars[1].structure
    assert required.frame and named.frame
    assert (required.frame.most, named.frame.most) == (16, 1)
    assert set(json.loads(required.source)["$defs"]) == {"weather", "clock"}
    assert set(json.loads(named.source)["$defs"]) == {"weather"}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a bad name": (function(name="a b"), "tools[0].function.name"),
    "a long name": (function(name="a" * 65), "tools[0].function.name"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "names twice": ({"tools": [CLOCK, CLOCK]}, "tools"),
    "too many": ({"tools": [CLOCK] * 129}, "tools"),
    "another type": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a custom tool without its field": (
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        "tools[0].custom",
    ),
    "a grammar without its field": (
        {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
        "tools[0].custom.format.grammar",
    ),
    "an allowed tool that is not there": (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "nope"}}],
                },
            },
        },
        "tool_choice",
    ),
    "no allowed tools": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
        "tool_choice",
    ),
    "old and new": ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
    "an old choice of no function": (
        {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
        "function_call",
    ),
    "no object": (function(parameters={"type": "string"}), "tools[0].function.parameters"),
    "no schema": (function(parameters=[]), "tools[0].function.parameters"),
    "too large": (
        function(parameters={"type": "object", "description": "x" * 70_000}),
        "tools[0].function.parameters",
    ),
    "an unknown word": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    "an unknown function": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "tool_choice",
    ),
    "a choice without tools": ({"tool_choice": "auto"}, "tool_choice"),
    "a choice of no tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "a bool as a string": ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    "the old fields with a bad name": ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    "the old choice without functions": ({"function_call": "auto"}, "function_call"),
    "calls of a user": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": "a",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
        "messages[0].tool_calls",
    ),
    "arguments that are no JSON": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{a"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_named(case: str) -> None:
    fields, param = REFUSED[case]
    async with server_url(engine_of("hermes")) as url:
        reply = await ask(url, "POST", PATH, {"messages": HELLO, **fields})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_a_model_whose_template_knows_no_tools_gets_them_all_the_same() -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    engine = FakeEngine(reply=REPLIES["hermes"], max_model_len=4096)
    async with server_url(engine) as url:
        choice = (await ask(url, "POST", PATH, body_of())).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        for fields in ({"tool_choice": "none"}, {"tool_choice": "required"}):
            assert (await ask(url, "POST", PATH, body_of(**fields))).status == 200
        assert (await ask(url, "POST", PATH, {"messages": [*HELLO, called]})).status == 200
        assert (await ask(url, "POST", "/tokenize", {"messages": HELLO, "tools": TOOLS})).status == 200


async def test_the_servers_own_truncated_call_is_taken_on_the_next_turn() -> None:
    engine = engine_of("llama")
    async with (
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        messages: list[Any] = list(HELLO)
        cut = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=47
        )
        (call,) = cut.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.arguments == '{"city": "Köl'
        messages += [cut.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": None}]
        await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    calls: Any = engine.messages[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"city": "Köl"}
    assert engine.messages[2]["content"] == ""


@pytest.mark.parametrize(
    ("written", "read"),
    [('{"city": "Kö\nln"}', {"city": "Kö\nln"}), ('{"city": NaN, "days": 2}', {"city": None, "days": 2})],
)
async def test_the_servers_own_call_that_is_not_quite_json_is_taken_on_the_next_turn(
    written: str, read: dict[str, Any]
) -> None:
    engine = engine_of("hermes")
    engine.reply = f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>'
    async with server_url(engine) as url:
        reply = (await ask(url, "POST", PATH, body_of(tools=TOOLS, max_tokens=200))).json()
        message = reply["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"] == written
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        again = body_of(tools=TOOLS, messages=[*HELLO, message, answer])
        assert (await ask(url, "POST", PATH, again)).status == 200
    calls: Any = engine.messages[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == read


async def test_a_choice_of_allowed_tools_leaves_only_those() -> None:
    engine = engine_of("hermes")
    tools = [{"type": "function", "function": {"name": "clock"}}]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    async with (
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        for mode in ("auto", "required"):
            allowed["allowed_tools"]["mode"] = mode
            reply = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice=allowed
            )
            assert reply.choices[0].message.tool_calls is None  # the model has called another one
    assert len(engine.tools) == 2  # the prompt stays the same, whatever is allowed
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, FakeGrammar)
    assert set(json.loads(grammar.structure.source)["$defs"]) == {"clock"}


CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "sh.run", "description": "a shell"}}
SCRIPT = 'echo "Köln 🦀"\n\tls\\'


def custom(**form: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {**CUSTOM["custom"], "format": {"type": "grammar", "grammar": form}}}


@pytest.mark.parametrize("ascii_only", [True, False])
async def test_a_custom_tool_is_called_with_text(ascii_only: bool) -> None:
    call = json.dumps({"name": "sh.run", "arguments": {"input": SCRIPT}}, ensure_ascii=ascii_only)
    engine = engine_of("hermes", f"<tool_call>\n{call}\n</tool_call>")
    messages: list[Any] = list(HELLO)
    async with (
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        tools: Any = [CUSTOM]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, stream=True
        )
        deltas = [chunk.choices[0].delta.model_dump()["tool_calls"] async for chunk in stream]
        (called,) = whole.choices[0].message.tool_calls or []
        assert called.type == "custom" and called.custom.name == "sh.run"
        assert called.custom.input == SCRIPT
        messages += [whole.choices[0].message, {"role": "tool", "tool_call_id": called.id, "content": "ok"}]
        await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    streamed = [each[0]["custom"] for each in deltas if each]
    assert streamed[0] == {"name": "sh.run", "input": ""} and len(streamed) > 5
    assert "".join(each["input"] for each in streamed) == SCRIPT
    calls: Any = engine.messages[1]["tool_calls"]
    assert calls[0]["function"] == {"name": "sh.run", "arguments": {"input": SCRIPT}}
    shown: Any = engine.tools[0]["function"]
    assert list(shown["parameters"]["properties"]) == ["input"]


async def test_a_custom_tool_s_grammar_is_told_and_kept() -> None:
    engine = engine_of("hermes", "12 + 3")
    body = {"messages": HELLO, "tool_choice": {"type": "custom", "custom": {"name": "sh.run"}}}
    lark = 'start: NUMBER "+" NUMBER'
    async with server_url(engine) as url:
        reply = await ask(url, "POST", PATH, {**body, "tools": [custom(syntax="lark", definition=lark)]})
        assert engine.requests[-1].grammar.structure.source == lark  # type: ignore[union-attr]
        regex = {**body, "tools": [custom(syntax="regex", definition="[a-z]+")]}
        assert (await ask(url, "POST", PATH, regex)).status == 200
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "sh.run", "input": "12 + 3"})
    shown: Any = engine.tools[0]["function"]
    assert shown["description"] == "a shell\n\nThe input must follow this regular expression:\n[a-z]+"
    assert '"pattern": "^(?:[a-z]+)$"' in engine.requests[-1].grammar.structure.source  # type: ignore


async def test_the_older_fields_and_the_function_role() -> None:
    engine = engine_of("hermes")
    functions: Any = [WEATHER["function"], CLOCK["function"]]
    messages: list[Any] = list(HELLO)
    async with (
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(model=MODEL, messages=messages, functions=functions)
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, functions=functions, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        choice = whole.choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
        assert choice.message.function_call is not None
        assert json.loads(choice.message.function_call.arguments) == {"city": "Köln"}
        messages += [choice.message, {"role": "function", "name": "weather", "content": "rain"}]
        await client.chat.completions.create(
            model=MODEL, messages=messages, functions=functions, function_call={"name": "weather"}
        )
    calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert calls[0].name == "weather" and chunks[-1].finish_reason == "function_call"
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Köln"}
    _, assistant, result = engine.messages
    told: Any = assistant["tool_calls"]
    assert told[0]["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert (result["role"], result["content"]) == ("tool", "rain")
    assert result["tool_call_id"] == told[0]["id"]
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, FakeGrammar)
    assert set(json.loads(grammar.structure.source)["$defs"]) == {"weather"}


async def test_a_template_in_an_unknown_format_is_refused_by_name_and_can_be_forced() -> None:
    engine = FakeEngine(
        tool_template="{{ tools }}<function_call>", reply=REPLIES["hermes"], max_model_len=4096
    )
    async with server_url(engine) as url:
        refused = await ask(url, "POST", PATH, body_of())
        forced = await ask(url, "POST", PATH, body_of(tool_choice="required"))
        never = await ask(url, "POST", PATH, body_of(tool_choice="none"))
    error = refused.json()["error"]
    assert (refused.status, error["param"]) == (400, "tools") and "--tool-call-parser" in error["message"]
    assert forced.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert never.status == 200


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [(REPLIES["hermes"], None, 1), ('{"city": "Rome"}', '{"city": "Rome"}', 0)],
)
async def test_a_form_and_tools_make_a_call_or_an_answer_of_the_form(
    reply: str, content: str | None, calls: int
) -> None:
    engine = engine_of("hermes", reply)
    async with (
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        messages: Any = HELLO
        form: Any = FORM
        whole = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, response_format=form
        )
    assert whole.choices[0].message.content == content
    assert len(whole.choices[0].message.tool_calls or []) == calls
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, FakeGrammar)
    structure = grammar.structure
    assert structure.frame is not None and set(json.loads(structure.source)["$defs"]) == {"weather", "clock"}
    assert structure.otherwise == StructuredOutput("json_schema", json.dumps(CITY))


async def test_a_function_s_name_may_have_dots() -> None:
    reply = REPLIES["hermes"].replace("weather", "files.read")
    tools = [{"type": "function", "function": {"name": "files.read", "parameters": CITY}}]
    async with server_url(engine_of("hermes", reply)) as url:
        for choice in ("auto", "required"):
            body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
            whole = (await ask(url, "POST", PATH, body)).json()["choices"][0]
            assert whole["message"]["tool_calls"][0]["function"]["name"] == "files.read"


async def test_strict_tools_hold_calls_of_the_model_s_own_accord_to_their_schemas() -> None:
    definition: Any = {**WEATHER["function"], "strict": True}  # type: ignore[dict-item]
    strict = {"type": "function", "function": definition}
    engine = engine_of("hermes")
    async with server_url(engine) as url:
        for tools, amid_text in (([WEATHER], None), ([strict, CLOCK], True)):
            reply = await ask(url, "POST", PATH, {"messages": HELLO, "tools": tools})
            assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
            grammar = engine.requests[-1].grammar
            assert amid_text is None or isinstance(grammar, FakeGrammar)
            assert (grammar and grammar.structure.amid_text) == amid_text  # type: ignore[attr-defined]
    schema = json.loads(grammar.structure.source)["$defs"]["weather"]  # type: ignore[union-attr]
    assert schema["additionalProperties"] is False
