"""Models, health, metrics, headers, keys: everything around generating."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from engine import EngineDead, EngineState, FinishReason, Overloaded
from server.app import build_app
from tests.e2e.http_server import MODEL, make_settings, server_url
from tests.e2e.wire import Wire, ask
from tests.support.fake_engine import FakeEngine

HEALTH = ("/health", "/health/live", "/ping")
READY = ("/health/ready", "/ready")


async def test_models_are_listed_and_found_by_any_of_their_names() -> None:
    async with server_url(FakeEngine()) as url:
        listing = (await ask(url, "GET", "/v1/models")).json()
        one = (await ask(url, "GET", "/v1/models/org/alias")).json()
        reply = await ask(url, "POST", "/v1/completions", {"model": "org/alias", "prompt": "a"})
    assert [model["id"] for model in listing["data"]] == [MODEL, "org/alias"]
    assert one == listing["data"][1]
    assert one.pop("created") > 1_700_000_000
    assert one == {
        "id": "org/alias",
        "object": "model",
        "owned_by": "slipstream",
        "root": "smollm2-135m-instruct",
        "parent": None,
        "max_model_len": 256,
    }
    assert reply.json()["model"] == "org/alias"


@pytest.mark.parametrize(
    ("state", "fault", "live", "ready", "code"),
    [
        (EngineState.READY, None, 200, 200, None),
        (EngineState.LOADING, None, 200, 503, "loading"),
        (EngineState.DRAINING, None, 200, 503, "draining"),
        (EngineState.DEAD, EngineDead("a fault"), 503, 503, "engine_dead"),
        (EngineState.DEAD, EngineDead("no progress", "engine_hung"), 503, 503, "engine_hung"),
    ],
)
async def test_health_tells_living_from_ready(
    state: EngineState, fault: EngineDead | None, live: int, ready: int, code: str | None
) -> None:
    async with server_url(FakeEngine(state=state, fault=fault)) as url:
        for path in HEALTH:
            assert (await ask(url, "GET", path)).status == live
        for path in READY:
            reply = await ask(url, "GET", path)
            assert reply.status == ready
            assert code is None or reply.json()["error"]["code"] == code
        assert (await ask(url, "GET", "/metrics")).status == 200
        assert (await ask(url, "GET", "/v1/models")).status == 200


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.DRAINING])
@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_read_when_nothing_can_be_taken(state: EngineState, stream: bool) -> None:
    engine = FakeEngine(state=state)
    async with server_url(engine) as url:
        reply = await ask(url, "POST", "/v1/completions", {"prompt": "a", "stream": stream})
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["code"]) == (503, "overloaded_error", state.value)
    assert reply.headers["retry-after"] == "3"
    assert engine.num_encoded == 0


@pytest.mark.parametrize(
    ("refusal", "kind", "code", "retry"),
    [
        (Overloaded("full", code="queue_full", retry_after_s=7), "overloaded_error", "queue_full", "7"),
        (EngineDead("The engine has stopped after a fault."), "server_error", "engine_dead", None),
    ],
)
async def test_a_full_queue_is_told_from_a_dead_engine(
    refusal: Exception, kind: str, code: str, retry: str | None
) -> None:
    engine = FakeEngine(refusal=refusal)
    async with server_url(engine) as url:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        reply = await ask(url, "POST", "/v1/chat/completions", body)
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["code"]) == (503, kind, code)
    assert reply.headers.get("retry-after") == retry
    assert engine.num_encoded == 0


async def test_a_request_id_is_kept_if_it_is_short_and_plain() -> None:
    async with server_url(FakeEngine()) as url:
        for label in ("abc-1", "x" * 128, "with space"):
            reply = await ask(url, "GET", "/version", None, {"x-request-id": label})
            assert reply.headers["x-request-id"] == label
        for label in ("x" * 129, "é", "a\tb"):
            reply = await ask(url, "GET", "/version", None, {"x-request-id": label})
            assert reply.headers["x-request-id"].startswith("req-")


async def test_the_same_request_id_twice_is_two_requests() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        replies = await asyncio.gather(
            *(
                ask(
                    url,
                    "POST",
                    "/v1/completions",
                    {"prompt": "a", "request_id": "r"},
                    {"x-request-id": "same"},
                )
                for _ in range(2)
            )
        )
    assert [(reply.status, reply.headers["x-request-id"]) for reply in replies] == [(200, "same")] * 2
    assert len({request.request_id for request in engine.requests}) == 2


async def test_a_request_id_in_the_body_labels_the_reply() -> None:
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", "/v1/completions", {"prompt": "a", "request_id": "mine"})
    assert reply.headers["x-request-id"] == "mine"


async def test_unknown_fields_are_named_or_refused() -> None:
    body = {"prompt": "a", "colour": "red", "flavour": {"a": 1}}
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", "/v1/completions", body)
        page = (await ask(url, "GET", "/metrics")).body.decode()
    assert (reply.status, reply.headers["x-slipstream-ignored"]) == (200, "colour,flavour")
    assert 'slipstream_ignored_parameters_total{model_name="test-model"} 2.0' in page
    async with server_url(FakeEngine(), strict_params=True) as url:
        reply = await ask(url, "POST", "/v1/completions", body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "colour")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"response_format": {"type": "text", "strict": 1}}, "response_format.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
        ({"structured_outputs": {"choice": ["a"], "whitespace": 1}}, "structured_outputs.whitespace"),
        ({"speculation": {"enabeld": False}}, "speculation.enabeld;did-you-mean=speculation.enabled"),
        ({"prediction": {"type": "content", "content": "a", "x": 1}}, "prediction.x"),
        (
            {"messages": [{"role": "user", "content": "a", "x": 1}] * 3, "y": 1},
            "messages[].x,y",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "x": 1}, "y": {"z": 1}}]},
            "tools[].function.x,tools[].y",
        ),
    ],
)
async def test_unknown_fields_inside_of_known_ones_are_treated_alike(
    fields: dict[str, Any], told: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert reply.headers["x-slipstream-ignored"] == told
    async with server_url(FakeEngine(), strict_params=True) as url:
        reply = await ask(url, "POST", "/v1/chat/completions", body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, told.split(",")[0].split(";")[0])


async def test_what_clients_send_back_of_a_reply_is_no_unknown_field() -> None:
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    messages = [{"role": "user", "content": "a"}, {**said, "function_call": None, "tool_calls": [call]}]
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert reply.status == 200 and "x-slipstream-ignored" not in reply.headers


async def test_a_misspelt_field_is_told_its_right_name(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "temprature": 0, "max-tokens": 3, "gided_json": "x", "colour": "red", "x;y": 1}
    meant = {"temprature": "temperature", "max-tokens": "max_tokens", "gided_json": "guided_json"}
    told = [*(f"{name};did-you-mean={right}" for name, right in meant.items()), "colour", "x_y"]
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", "/v1/completions", body)
    assert reply.headers["x-slipstream-ignored"] == ",".join(told)
    assert [record.args for record in caplog.records if "is unknown and ignored" in record.message] == [
        (name,) for name in told
    ]
    async with server_url(FakeEngine(), strict_params=True) as url:
        reply = await ask(url, "POST", "/v1/completions", body)
    assert reply.json()["error"]["message"] == "'temprature' is not a known field; 'temperature' is."


async def test_keys_guard_all_but_the_open_paths(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("second\n\nthird\n")
    engine = FakeEngine()
    async with server_url(engine, api_key=("first",), api_key_file=file) as url:
        for path in (*HEALTH, *READY, "/metrics"):
            assert (await ask(url, "GET", path)).status == 200
        for path in (
            "/v1/models",
            "/version",
            "/redoc",
            "/openapi.json",
            "/nope",
            "//health",
            "/health/",
            "/%68ealth",
        ):
            reply = await ask(url, "GET", path)
            expected = 200 if path == "/%68ealth" else 401  # decoded before anyone looks at it
            assert reply.status == expected, path
        assert reply.status == 200
        for sent in (
            "",
            "first",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Basic first",
            "Bearer first x",
            "Bearer é",
        ):
            reply = await ask(url, "GET", "/v1/models", None, {"authorization": sent})
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.json()["error"]["type"] == "authentication_error"
        for key in ("first", "second", "third"):
            headers = {"authorization": f"bearer {key}"}
            assert (await ask(url, "POST", "/v1/completions", {"prompt": "a"}, headers)).status == 200
    tenants = {request.tenant for request in engine.requests}
    assert len(tenants) == 3
    assert not tenants & {"first", "second", "third", None}


@pytest.mark.parametrize(
    ("path", "body", "num_calls"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "truncate_prompt_tokens": 1}, 2),
        ("/v1/completions", {"prompt": "abc", "echo": True, "truncate_prompt_tokens": 1}, 2),
        ("/v1/completions", {"prompt": "a", "bad_words": ["b"]}, 3),
        ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": "b"}}, 2),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "b"}}, 2),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 1),
        ("/tokenize", {"prompt": "a"}, 1),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, 1),
        ("/detokenize", {"tokens": [65]}, 1),
    ],
)
async def test_work_on_text_is_done_in_the_turn_of_the_key_that_asks(
    path: str, body: dict[str, Any], num_calls: int
) -> None:
    engine = FakeEngine()
    async with server_url(engine, api_key=("k",)) as url:
        reply = await ask(url, "POST", path, body, {"authorization": "Bearer k"})
        assert reply.status == 200, reply.body
    assert len(engine.tenants) == num_calls
    assert len(set(engine.tenants)) == 1
    assert None not in engine.tenants


@pytest.mark.parametrize("host", ["x/health?", "x#", "a@b", "localhost/health"])
async def test_the_host_header_opens_no_path(host: str) -> None:
    async with server_url(FakeEngine(), api_key=("k",)) as url:
        reply = await ask(url, "GET", "/v1/models", None, {"host": host})
    assert reply.status in (400, 401, 403)


async def test_two_authorization_headers_are_none() -> None:
    async with server_url(FakeEngine(), api_key=("k",)) as url:
        wire = await Wire.connect(url)
        wire.writer.write(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"authorization: Bearer k\r\n" * 2 + b"\r\n"
        )
        assert (await wire.reply()).status == 401
        await wire.close()


async def test_metrics_can_be_guarded_too() -> None:
    async with server_url(FakeEngine(), api_key=("k",), protect_metrics=True) as url:
        assert (await ask(url, "GET", "/metrics")).status == 401
        assert (await ask(url, "GET", "/metrics", None, {"authorization": "Bearer k"})).status == 200


async def test_metrics_come_in_the_format_that_is_asked_for() -> None:
    engine = FakeEngine()
    engine.metrics.requests_finished[FinishReason.STOP] = 4
    async with server_url(engine) as url:
        plain = await ask(url, "GET", "/metrics")
        openmetrics = {"accept": "application/openmetrics-text; version=1.0.0"}
        reply = await ask(url, "GET", "/metrics", None, openmetrics)
    line = 'slipstream_requests_total{finish_reason="stop",model_name="test-model"} 4.0'
    assert line in plain.body.decode().splitlines() and line in reply.body.decode().splitlines()
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")


async def test_strangers_add_no_series() -> None:
    async with server_url(FakeEngine()) as url:
        await ask(url, "GET", "/nope")
        before = len((await ask(url, "GET", "/metrics")).body.splitlines())
        await ask(url, "GET", "/metrics")
        for i in range(50):
            await ask(url, "GET", f"/path/{i}")
            await ask(url, "GET", f"/v1/models/m{i}")
            await ask(url, "POST", "/v1/completions", {"prompt": "a", "model": f"m{i}"})
        after = len((await ask(url, "GET", "/metrics")).body.splitlines())
    assert after - before == 3  # /metrics 200, and a 404 of each route


async def test_the_openapi_document_resolves() -> None:
    async with server_url(FakeEngine()) as url:
        document = (await ask(url, "GET", "/openapi.json")).json()
        again = (await ask(url, "GET", "/openapi.json")).json()
    assert document == again
    schemas = document["components"]["schemas"]
    assert {"CompletionRequest", "ChatCompletionRequest", "ChatMessage", "StreamOptions"} <= schemas.keys()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/CompletionRequest"}
    assert {"prompt", "temperature", "logit_bias", "structured_outputs"} <= schemas["CompletionRequest"][
        "properties"
    ].keys()


def test_no_layer_can_hide_a_leaving_client() -> None:
    app = build_app(make_settings(), FakeEngine())  # type: ignore[arg-type]
    assert len(app.user_middleware) == 5
    for layer in app.user_middleware:
        assert not (isinstance(layer.cls, type) and issubclass(layer.cls, BaseHTTPMiddleware))
