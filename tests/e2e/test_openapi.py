"""The OpenAPI document says what there is, and nothing that follows it, or nearly, makes the server fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from engine import DraftingChange, Engine
from server.app import build_app
from tests.e2e.http_server import make_settings
from tests.support.examples import share_of
from tests.support.fake_engine import FakeEngine

ROUTES = {
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/infill"),
    ("post", "/v1/responses"),
    ("get", "/v1/responses/{response_id}"),
    ("delete", "/v1/responses/{response_id}"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
    *(
        ("post", path)
        for path in ("/api/chat", "/api/generate", "/api/show", "/api/embed", "/api/embeddings")
    ),
    *(("get", path) for path in ("/api/tags", "/api/ps", "/api/version")),
    ("post", "/v1/embeddings"),
    *(("post", path) for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model_id}"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/tokenizer_info"),
    *(("get", path) for path in ("/health", "/health/live", "/ping", "/health/ready", "/ready")),
    *(("get", path) for path in ("/metrics", "/version", "/load", "/server_info")),
    ("post", "/v1/requests/{request_id}/cancel"),
    ("patch", "/v1/requests/{request_id}"),
    ("patch", "/server_info"),
    ("get", "/v1/requests/{request_id}"),
    ("get", "/v1/requests"),
    *((method, "/v1/files") for method in ("get", "post")),
    *((method, "/v1/files/{file_id}") for method in ("get", "delete")),
    ("get", "/v1/files/{file_id}/content"),
    *((method, "/v1/batches") for method in ("get", "post")),
    ("get", "/v1/batches/{batch_id}"),
    ("post", "/v1/batches/{batch_id}/cancel"),
    ("post", "/reset_prefix_cache"),
}
GENERATE = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill"}
MANY, BROKEN, FEW = share_of(40, 8), share_of(12), 2  # examples of a route


@dataclass
class ForgetfulEngine(FakeEngine):
    """Has a prefix cache with nothing in it, and drafts as it did before."""

    def change_drafting(self, change: DraftingChange) -> None:
        pass

    def reset_prefix_cache(self, owner: str | None = None) -> int:
        return 0


def document_of(**server: Any) -> tuple[Any, dict[str, Any]]:
    """The application over an engine that answers anything, and its document."""
    # As schemathesis calls it.
    settings = make_settings(max_n=2, allowed_host=("testserver",), ollama_api=True, **server)
    app = build_app(settings, cast(Engine, ForgetfulEngine(max_model_len=64)))
    return app, app.openapi()


def test_every_route_is_there_with_its_body_and_its_error() -> None:
    _, document = document_of()
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert set(operations) == ROUTES
    for (method, path), operation in operations.items():
        assert operation["responses"]["default"]["content"]["application/json"], path
        assert "422" not in operation["responses"], path
        bare = {"/v1/requests/{request_id}/cancel", "/v1/batches/{batch_id}/cancel", "/reset_prefix_cache"}
        told = "x-slipstream-ignored" in operation["responses"]["200"].get("headers", {})
        assert told == (method == "post" and path not in {*bare, "/v1/files"}), path
        assert ("requestBody" in operation) == (method in ("post", "patch") and path not in bare), path
    for path in GENERATE:
        content = operations["post", path]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    for path in ("/api/chat", "/api/generate"):
        content = operations["post", path]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "application/x-ndjson"}
    assert "text/plain" in operations["get", "/metrics"]["responses"]["200"]["content"]


def references(value: object) -> Iterator[str]:
    """Every `$ref` anywhere in a document."""
    if isinstance(value, dict):
        yield from (each for name, each in value.items() if name == "$ref" and isinstance(each, str))
        yield from itertools.chain.from_iterable(map(references, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(references, value))


def test_every_reference_leads_somewhere() -> None:
    _, document = document_of()
    schemas = document["components"]["schemas"]
    assert {each.removeprefix("#/components/schemas/") for each in references(document)} <= set(schemas)


def described_things(value: object, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a body and every parameter of a route, anywhere in a document."""
    if isinstance(value, dict):
        for name, child in value.items():
            if name == "properties":
                yield from ((f"{where}/{each}", field) for each, field in child.items())
            elif name == "parameters" and isinstance(child, list):
                yield from ((f"{where}/{each['name']}", each) for each in child)
            yield from described_things(child, f"{where}/{name}")
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(described_things, value, itertools.repeat(where)))


@pytest.mark.parametrize("name", ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
def test_what_a_model_may_advise_is_told_where_it_may_be_left_out(name: str) -> None:
    _, document = document_of()
    bodies = [
        each["properties"] for each in document["components"]["schemas"].values() if "properties" in each
    ]
    fields = [each[name] for each in bodies if "max_tokens" in each or "max_output_tokens" in each]
    assert len(fields) == 4  # completions, chat, responses, messages
    assert all("as the model's makers advise" in each["description"] for each in fields)


def test_every_field_and_parameter_has_a_description() -> None:
    _, document = document_of()
    found = list(described_things(document))
    assert len(found) > 90
    assert [where for where, each in found if not each.get("description")] == []


def test_nothing_is_defined_that_no_route_refers_to() -> None:
    _, document = document_of()
    used = {each.removeprefix("#/components/schemas/") for each in references(document)}
    assert set(document["components"]["schemas"]) == used


def check_no_fault(context: Any, response: Any, case: Any) -> bool | None:
    """A 5xx is a fault, unless it says that the caller's own deadline has passed."""
    if response.status_code == 504:
        error = response.json()["error"]
        if isinstance(error, str) or error["type"] == "timeout_error":  # Ollama's has no type
            return None
    return not_a_server_error(context, response, case)


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The served document, as schemathesis reads it."""
    app, document = document_of(state_dir=tmp_path_factory.mktemp("state"))
    served = schemathesis.openapi.from_asgi("/openapi.json", app)
    assert served.raw_schema == document
    return served


FOLLOWING = [(*route, GenerationMode.POSITIVE) for route in sorted(ROUTES)]
BREAKING = [
    (method, path, GenerationMode.NEGATIVE)
    for method, path in sorted(ROUTES)
    if method in ("post", "patch") and path != "/reset_prefix_cache" and not path.endswith("/cancel")
]


@pytest.mark.parametrize(("method", "path", "mode"), FOLLOWING + BREAKING)
def test_nothing_that_follows_it_or_nearly_makes_a_fault(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method.upper()]
    most = BROKEN if mode is GenerationMode.NEGATIVE else MANY

    @seed(1)
    @settings(
        max_examples=FEW if method == "get" else most,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call()
        case.validate_response(
            response,
            checks=[
                check_no_fault,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    run()
