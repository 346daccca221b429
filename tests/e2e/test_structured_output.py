"""response_format and structured_outputs over a real socket: what is asked for, refused, and comes back."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from engine import StructuredOutput
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import FakeEngine, FakeGrammar
from tests.support.structures import SCHEMAS
from tests.support.tiny_models import save_tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
SCHEMA: dict[str, Any] = SCHEMAS["object"]
SOURCE = json.dumps(SCHEMA)


def json_schema(schema: Any, **further: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, **further},
        }
    }


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


# What the engine is asked for.


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            StructuredOutput("json_schema", SOURCE),
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            StructuredOutput("json_schema", SOURCE),
        ),
        (
            json_schema({"type": "object", "properties": {"a": {}}}, strict=True),
            StructuredOutput(
                "json_schema",
                json.dumps({"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
            ),
        ),
        (json_schema(SCHEMA), StructuredOutput("json_schema", SOURCE)),
        (json_schema(SCHEMA, strict=False, description="d"), StructuredOutput("json_schema", SOURCE)),
        (outputs(json=SCHEMA), StructuredOutput("json_schema", SOURCE)),
        (outputs(json=SOURCE), StructuredOutput("json_schema", SOURCE)),
        (outputs(json_object=True), StructuredOutput("json_object")),
        (outputs(regex="a+"), StructuredOutput("regex", "a+")),
        (outputs(choice=["a", "b"]), StructuredOutput("choice", '["a", "b"]')),
        (outputs(grammar='root ::= "a"'), StructuredOutput("grammar", 'root ::= "a"')),
        ({"response_format": {"type": "text"}, **outputs(regex="a")}, StructuredOutput("regex", "a")),
    ],
)
async def test_what_is_asked_for_reaches_the_engine_once_for_all_choices(
    path: str, fields: dict[str, Any], expected: StructuredOutput | None
) -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        reply = await ask(url, "POST", path, {**PROMPTS[path], **fields, "max_tokens": 2, "n": 2})
        assert reply.status == 200, reply.body
    first, second = engine.requests
    assert first.grammar is second.grammar
    assert expected == (first.grammar.structure if isinstance(first.grammar, FakeGrammar) else None)


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (json_schema({"const": "refuse me"}), "response_format.json_schema.schema", "cannot be used: no"),
        (outputs(regex="refuse me"), "structured_outputs.regex", "cannot be used: no"),
        (outputs(json=SCHEMA, regex="a"), "structured_outputs", "exactly one of json,"),
        (outputs(), "structured_outputs", "exactly one of json,"),
        (outputs(json_object=False), "structured_outputs", "exactly one of json,"),
        ({"response_format": {"type": "json_object"}, **outputs(regex="a")},
         "structured_outputs", "both ask"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (json_schema(None), "response_format.json_schema.schema", "is missing"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
         "response_format.json_schema", "needs 'type'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name", "is missing"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": "json_object"}, "response_format", ""),
        (json_schema("{}"), "response_format.json_schema.schema", "must be an object"),
        (json_schema(SCHEMA, strict="yes"), "response_format.json_schema.strict", "must be true or false"),
        (outputs(choice=[]), "structured_outputs.choice", "must not be empty"),
        (outputs(choice="ab"), "structured_outputs.choice", "list"),
        (outputs(choice=["a", 1]), "structured_outputs.choice[1]", "string"),
        (outputs(regex=1), "structured_outputs.regex", "string"),
        (outputs(grammar={}), "structured_outputs.grammar", "string"),
        (outputs(structural_tag="{}"), "structured_outputs", "exactly one of json,"),
        ({"guided_json": SCHEMA}, "guided_json", "structured_outputs"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        reply = await ask(url, "POST", path, {**PROMPTS[path], **fields})
    assert reply.status == 400, reply.body
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert reason in error["message"]
    assert not engine.requests


# What comes back from a real model.

SAMPLED = {"max_tokens": 120, "seed": 4, "n": 2}

BAD_SOURCES = [
    (json_schema({"uniqueItems": True}), "response_format.json_schema.schema", "uniqueItems"),
    (json_schema({"$ref": "#/$defs/x" + "y" * 500}), "response_format.json_schema.schema", "…"),
    (outputs(json="{"), "structured_outputs.json", "not valid JSON"),
    (outputs(json={"type": "object", "properties": {str(i): {} for i in range(2000)}}),
     "structured_outputs.json", "2000 properties; the limit is 1000"),
    (outputs(regex="a("), "structured_outputs.regex", "unclosed group"),
    (outputs(choice=[""]), "structured_outputs.choice", "empty"),
    (outputs(grammar="start: a"), "structured_outputs.grammar", 'unknown name: "a"'),
]  # fmt: skip


async def test_bad_sources_are_400_and_leave_nothing(directory: Path) -> None:
    async with real_engine(directory) as engine, server_url(engine) as url:
        for path, prompt in PROMPTS.items():
            for fields, param, reason in BAD_SOURCES:
                reply = await ask(url, "POST", path, {**prompt, **fields, "stream": True})
                error = reply.json()["error"]
                assert (reply.status, error["param"]) == (400, param)
                assert reason in error["message"]
                assert len(error["message"]) < 220
        assert engine.metrics.requests_started == 0


@pytest.mark.by_default("auto")
@pytest.mark.parametrize("method", ["none", "auto"])
async def test_streams_say_what_whole_replies_say_and_both_have_the_form(
    directory: Path, method: str
) -> None:
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (json_schema(SCHEMA), SCHEMA),
        (outputs(json=SCHEMAS["nested"]), SCHEMAS["nested"]),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ]
    cells = [(path, fields, schema) for path in PROMPTS for fields, schema in forms]
    async with real_engine(directory, "--speculative-method", method) as engine, server_url(engine) as url:
        bodies = [(path, {**PROMPTS[path], **fields, **SAMPLED}) for path, fields, _ in cells]
        wholes = await asyncio.gather(*(ask(url, "POST", *each) for each in bodies))
        streams = await asyncio.gather(
            *(ask(url, "POST", path, {**body, "stream": True}) for path, body in bodies)
        )
    reasons: dict[str, set[str]] = {path: set() for path in PROMPTS}
    for (path, _, schema), whole, stream in zip(cells, wholes, streams, strict=True):
        events = events_of(stream.body)
        for choice in whole.json()["choices"]:
            reasons[path].add(choice["finish_reason"])
            own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
            assert "".join(map(text_in, own)) == text_in(choice)
            assert own[-1]["finish_reason"] == choice["finish_reason"]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(text_in(choice)), schema)
    assert all(found <= {"stop", "length"} and "stop" in found for found in reasons.values())


def text_in(choice: dict[str, Any]) -> str:
    """The text of a choice of either endpoint, whole or a part."""
    message = choice.get("message") or choice.get("delta")
    return choice["text"] if "text" in choice else (message or {}).get("content") or ""


class Step(BaseModel):
    explanation: str = Field(max_length=12)
    output: Literal["x = 1", "x = 2"]


class Solution(BaseModel):
    """What the model is to write."""

    steps: list[Step] = Field(min_length=1, max_length=2)
    verdict: Literal["right", "wrong"] | None
    score: int = Field(ge=0, le=10)


async def test_the_official_client_parses_pydantic_models(directory: Path) -> None:
    """Seeds are tried until a reply is whole within the tiny context; each that is parses."""
    async with (
        real_engine(directory) as engine,
        server_url(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):

        async def parsed(seed: int) -> Solution | None:
            try:
                reply = await client.chat.completions.parse(
                    model=MODEL,
                    messages=[{"role": "user", "content": "x?"}],
                    response_format=Solution,
                    seed=seed,
                    max_tokens=220,
                )
            except openai.LengthFinishReasonError:
                return None
            return reply.choices[0].message.parsed

        replies = await asyncio.gather(*map(parsed, range(6)))
        async with client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "x?"}],
            response_format=Step,
            seed=1,
            max_tokens=220,
        ) as stream:
            async for _ in stream:
                pass
            last = (await stream.get_final_completion()).choices[0].message.parsed
    found = [reply for reply in replies if reply is not None]
    assert len(found) >= 2
    assert all(isinstance(each, Solution) for each in found)
    assert isinstance(last, Step)


async def test_other_forms_over_http(directory: Path) -> None:
    async with real_engine(directory) as engine, server_url(engine) as url:

        async def text_of(**fields: Any) -> str:
            body = {**PROMPTS[COMPLETIONS], "max_tokens": 40, **outputs(**fields)}
            (choice,) = (await ask(url, "POST", COMPLETIONS, body)).json()["choices"]
            assert choice["finish_reason"] == "stop"
            return str(choice["text"])

        found = await asyncio.gather(
            text_of(regex="[0-9]{3}-[a-f]{2}"),
            text_of(choice=["red", "green"]),
            text_of(grammar='start: "<" /[a-z]{1,4}/ ">"'),
            text_of(grammar='root ::= "<" [a-z] [a-z]? ">"\n'),
        )
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", found[0])
    assert found[1] in ("red", "green")
    assert re.fullmatch("<[a-z]{1,4}>", found[2])
    assert re.fullmatch("<[a-z]{1,2}>", found[3])
