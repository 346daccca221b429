"""Ollama's API over a real socket: shapes, lines, what reaches the engine, and the gates before it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine import DeadlineExceeded, FillInMiddle, Overloaded, RequestFailed
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import RawReply, Wire, ask
from tests.support import tool_templates
from tests.support.fake_engine import FakeEngine, FakeGrammar
from tests.support.ollama_grammar import check_lines, check_reply

CHAT, GENERATE = "/api/chat", "/api/generate"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}]
HELLO = [{"role": "user", "content": "hi"}]


def engine_of(reply: str | None = None, **fields: Any) -> FakeEngine:
    return FakeEngine(
        tool_template=tool_templates.ALL["hermes"], reply=reply, **{"max_model_len": 4096, **fields}
    )


def url_of(engine: FakeEngine, **settings: Any) -> Any:
    return server_url(engine, ollama_api=True, **settings)


async def post(url: str, path: str, **body: Any) -> RawReply:
    return await ask(url, "POST", path, body)


def lines_of(reply: RawReply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.body.endswith(b"}\n")
    return [json.loads(line) for line in reply.body.splitlines()]


def shown(engine: FakeEngine) -> list[tuple[object, object]]:
    """What the template was shown last: roles and contents."""
    return [(each["role"], each["content"]) for each in engine.messages]


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "hi"})], ids=["chat", "generate"]
)
async def test_a_reply_comes_in_lines_and_whole_and_says_the_same(path: str, asked: dict[str, Any]) -> None:
    text = f"<think>Let me see.</think>Hello.{'' if path == GENERATE else CALL}"
    tools = {} if path == GENERATE else {"tools": TOOLS}
    engine = engine_of(text, reasoning="qwen3")
    async with url_of(engine) as url:
        streamed = lines_of(await post(url, path, **asked, **tools))  # streamed unless told otherwise
        whole = (await post(url, path, **asked, **tools, stream=False)).json()
    said = check_lines(streamed)
    assert (said["content"], said["thinking"]) == ("Hello.", "Let me see.")
    called = [call["function"] for call in said["tool_calls"]]
    assert called == (
        [] if path == GENERATE else [{"index": 0, "name": "weather", "arguments": {"city": "Köln"}}]
    )
    again = check_reply(whole)
    assert [again.pop("content"), again.pop("thinking")] == [said["content"], said["thinking"]]
    assert [call["function"] for call in again["tool_calls"]] == called
    end = streamed[-1]
    assert end["model"] == MODEL and end["done_reason"] == "stop"
    assert (end["eval_count"], end["eval_duration"]) == (len(text), 100_000_000)
    assert (end["prompt_eval_duration"], end["total_duration"]) == (9_000_000, 110_000_000)
    assert end["metrics"]["queue_time_ms"] == 1.0


async def test_options_reach_the_engine_and_those_without_effect_are_named() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "num_predict": 5,
        "repeat_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "seed": 3,
        "stop": ["x", "y"],
        "num_ctx": 4096,
        "mirostat": 1,
    }
    engine = engine_of()
    async with url_of(engine) as url:
        reply = await post(url, CHAT, messages=HELLO, options=options, keep_alive="5m", priority=-3)
    assert reply.headers["x-slipstream-ignored"] == "options.num_ctx,options.mirostat"
    request = engine.requests[0]
    found = request.sampling
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 7, 0.9, 0.1)
    assert (found.max_tokens, found.seed, found.stop) == (5, 3, ("x", "y"))
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.5, 1, -1)
    assert request.priority == -3
    assert lines_of(reply)[-1]["done_reason"] == "length"


@pytest.mark.parametrize("options", [None, {}, {"num_predict": -1}, {"num_predict": 0}, {"seed": -1}])
async def test_without_a_limit_a_reply_ends_with_the_context(options: object) -> None:
    engine = engine_of(max_model_len=32)
    async with url_of(engine) as url:
        await post(url, GENERATE, prompt="hi", options=options, raw=True)
    assert engine.requests[0].sampling.max_tokens == 30
    assert engine.requests[0].sampling.seed != -1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_that_json_has_not_is_null_in_a_call(stream: bool) -> None:
    engine = engine_of(
        '<tool_call>\n{"name": "weather", "arguments": {"city": NaN, "days": 2}}\n</tool_call>'
    )
    async with url_of(engine) as url:
        reply = await post(url, CHAT, messages=HELLO, tools=TOOLS, stream=stream)
    said = check_lines(lines_of(reply)) if stream else check_reply(reply.json())
    (call,) = said["tool_calls"]
    assert call["function"]["arguments"] == {"city": None, "days": 2}


async def test_a_conversation_with_calls_reaches_the_template() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("a", "b", "b")]
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "B", "tool_name": "b"},
        {"role": "tool", "content": "A"},
        {"role": "tool", "content": "B2", "tool_name": "b"},
        {"role": "tool", "content": "?", "tool_call_id": "mine"},
    ]
    engine = engine_of("ok")
    async with url_of(engine) as url:
        assert (await post(url, CHAT, messages=messages, tools=TOOLS)).status == 200
    roles = ["system", "user", "assistant", *["tool"] * 4]
    assert [role for role, _ in shown(engine)] == roles
    made: dict[str, Any] = engine.messages[2]
    assert made["reasoning_content"] == "Well."
    assert [call["id"] for call in made["tool_calls"]] == ["call_2_0", "call_2_1", "call_2_2"]
    answered = [message["tool_call_id"] for message in engine.messages[3:]]
    assert answered == ["call_2_1", "call_2_0", "call_2_2", "mine"]
    tool: Any = engine.tools[0]
    assert tool["function"]["name"] == "weather"


async def test_a_prompt_is_a_chat_unless_it_is_raw_or_has_a_suffix() -> None:
    marks = FillInMiddle(ord("P"), ord("S"), ord("M"), frozenset({ord("E")}))
    engine = engine_of("ok", fill_in_middle=marks, adds_bos=True)
    async with url_of(engine) as url:
        await post(url, GENERATE, prompt="hi", system="Be brief.")
        assert shown(engine) == [("system", "Be brief."), ("user", "hi")]
        await post(url, GENERATE, prompt="hi", raw=True)
        reply = await post(url, GENERATE, prompt="hi", suffix="!", stream=False)
    assert check_reply(reply.json())["content"] == "ok"
    prompts = ["".join(map(chr, request.prompt_token_ids)) for request in engine.requests]
    assert prompts[1:] == ["^hi", "^PhiS!M"]
    assert engine.requests[2].sampling.stop_token_ids == {ord("E")}


@pytest.mark.parametrize(
    ("form", "kind"),
    [("json", "json_object"), (CITY, "json_schema"), ({}, "json_schema"), ("", None), (None, None)],
)
async def test_a_form_holds(form: object, kind: str | None) -> None:
    engine = engine_of("{}")
    async with url_of(engine) as url:
        reply = await post(url, CHAT, messages=HELLO, format=form)
    assert reply.status == 200, reply.body
    grammar = engine.requests[0].grammar
    assert (grammar.structure.kind if isinstance(grammar, FakeGrammar) else None) == kind
    if form is CITY:  # closed to keys that it does not name
        assert isinstance(grammar, FakeGrammar)
        assert json.loads(grammar.structure.source)["additionalProperties"] is False


@pytest.mark.parametrize(
    ("think", "options"),
    [
        (None, {}),
        (False, {"enable_thinking": False, "thinking": False}),
        (True, {"enable_thinking": True, "thinking": True}),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
async def test_whether_to_think_reaches_the_template(think: object, options: dict[str, object]) -> None:
    engine = engine_of("ok", reasoning="qwen3")
    async with url_of(engine) as url:
        assert (await post(url, CHAT, messages=HELLO, think=think)).status == 200
    assert engine.options == options


@pytest.mark.parametrize("name", [None, MODEL, f"{MODEL}:latest", "org/alias", "org/alias:latest"])
async def test_a_model_answers_to_its_names_with_a_tag_and_without(name: str | None) -> None:
    async with url_of(engine_of("ok")) as url:
        reply = await post(url, CHAT, model=name, messages=HELLO, stream=False)
        card = await post(url, "/api/show", name=name)
    assert reply.json()["model"] == (name or MODEL)
    assert card.json()["capabilities"] == ["completion", "tools"]


async def test_what_clients_ask_first() -> None:
    async with url_of(engine_of()) as url:
        tags, running, version = [
            (await ask(url, "GET", path)).json() for path in ("/api/tags", "/api/ps", "/api/version")
        ]
        card = (await post(url, "/api/show", model=MODEL, verbose=True)).json()
        assert (await ask(url, "GET", "/api/nope")).json()["error"].startswith("There is no path")
    assert [row["name"] for row in tags["models"]] == [f"{MODEL}:latest", "org/alias:latest"]
    assert len(tags["models"][0]["digest"]) == 64
    assert [row["context_length"] for row in running["models"]] == [4096, 4096]
    assert version["version"].count(".") == 2
    family = card["model_info"]["general.architecture"]
    assert card["model_info"][f"{family}.context_length"] == 4096
    assert card["template"] == "{{ 1 }}"


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {"prompt": "", "keep_alive": 0})]
)
async def test_a_request_that_says_nothing_asks_whether_the_model_is_loaded(path: str, body: Any) -> None:
    engine = engine_of()
    async with url_of(engine) as url:
        reply = await ask(url, "POST", path, body)
    assert (reply.status, reply.json()["done"], reply.json()["done_reason"]) == (200, True, "load")
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "nope", "messages": HELLO}, 404, "'nope'"),
        ("/api/show", {"model": "nope"}, 404, "'nope'"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": [{**HELLO[0], "images": ["aGk="]}]}, 400, "images"),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, 400, "not supported"),
        (CHAT, {"messages": HELLO, "think": True}, 400, "does not support thinking"),
        (CHAT, {"messages": HELLO, "logprobs": True}, 400, "'logprobs'"),
        (CHAT, {"messages": HELLO, "format": "xml"}, 400, "format"),
        (CHAT, {"messages": HELLO, "format": {"type": "refuse me"}}, 400, "'format'"),
        (CHAT, {"messages": HELLO, "options": {"temperature": "hot"}}, 400, "options.temperature"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "'template'"),
        (GENERATE, {"prompt": "a", "context": [1]}, 400, "'context'"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, 400, "'suffix'"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, 400, "'system'"),
        (GENERATE, {"prompt": "a", "raw": True, "think": True}, 400, "'think'"),
        (GENERATE, {"prompt": "a" * 5000}, 400, "maximum context length"),
        (GENERATE, {"prompt": "a", "deadline_ms": 0}, 400, "deadline_ms"),
    ],
)
async def test_errors_have_ollamas_shape(path: str, body: Any, status: int, words: str) -> None:
    engine = engine_of()
    async with url_of(engine) as url:
        reply = await ask(url, "POST", path, body)
    assert reply.status == status, reply.body
    assert reply.json().keys() == {"error"} and words in reply.json()["error"]
    assert not engine.requests


async def test_the_gates_are_those_of_every_other_path() -> None:
    engine = engine_of()
    async with url_of(engine, api_key=("secret",), strict_params=True) as url:
        body: Any = {"messages": HELLO, "options": {"num_predict": 1}}
        key = {"authorization": "Bearer secret"}
        no_key = await ask(url, "POST", CHAT, body)
        foreign = await ask(url, "POST", CHAT, body, {**key, "origin": "https://elsewhere.example"})
        renamed = await ask(url, "POST", CHAT, body, {**key, "host": "rebound.example"})
        strict = await ask(url, "POST", CHAT, {**body, "options": {"num_ctx": 1}}, key)
        plain = await ask(url, "POST", CHAT, b"{}", {**key, "content-type": "text/plain"})
        engine.refusal = Overloaded("The queue is full.", code="queue_full", retry_after_s=7)
        full = await ask(url, "POST", CHAT, body, key)
        engine.refusal = DeadlineExceeded("Too late.")
        late = await ask(url, "POST", CHAT, body, key)
        listed = (await ask(url, "GET", "/metrics", headers=key)).body.decode()
    statuses = [each.status for each in (no_key, foreign, renamed, strict, plain, full, late)]
    assert statuses == [401, 403, 403, 400, 415, 503, 504]
    assert full.headers["retry-after"] == "7"
    assert 'route="/api/chat"' in listed and not engine.requests


async def test_an_error_after_the_first_line_is_a_line() -> None:
    engine = engine_of("Hello", failure=RequestFailed("no", stage="sampler"), fail_at=2)
    async with url_of(engine) as url:
        streamed = lines_of(await post(url, CHAT, messages=HELLO))
        whole = await post(url, CHAT, messages=HELLO, stream=False)
    assert [line.get("error", line.get("message", {}).get("content")) for line in streamed] == [
        *("H", "e"),
        "The request could not be finished: no.",
    ]
    assert whole.status == 500 and whole.json() == {"error": "The request could not be finished: no."}


async def test_a_silent_stream_has_an_empty_line_now_and_then() -> None:
    going = asyncio.Event()

    async def gate(i: int) -> None:
        if i:
            await going.wait()

    async with url_of(engine_of("ab", gate=gate), sse_keepalive_seconds=0.01) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", CHAT, json.dumps({"messages": HELLO}).encode())
        await wire.head()
        first, silent = json.loads(await wire.chunk()), json.loads(await wire.chunk())
        going.set()
        rest = [json.loads(chunk) for chunk in await wire.chunks()]
        await wire.close()
    assert (first["message"]["content"], silent["message"]["content"], silent["done"]) == ("a", "", False)
    assert check_lines([first, silent, *rest])["content"] == "ab"


async def test_a_client_that_leaves_ends_its_request() -> None:
    engine = engine_of("ab" * 500, gate=lambda _: asyncio.sleep(0.001))
    async with url_of(engine) as url:
        wire = await Wire.connect(url)
        await wire.send("POST", CHAT, json.dumps({"messages": HELLO}).encode())
        await wire.head()
        await wire.close()
        await asyncio.wait_for(engine.streams[0].closed.wait(), 5)


async def test_without_the_flag_there_is_none_of_it() -> None:
    async with server_url(engine_of()) as url:
        replies = [await post(url, CHAT, messages=HELLO), await ask(url, "GET", "/api/tags")]
    assert [reply.status for reply in replies] == [404, 404]
    assert all("--ollama-api" in reply.json()["error"] for reply in replies)
