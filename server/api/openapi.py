"""The OpenAPI document's account of what routes read and answer for themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.http.anthropic_error import speaks_anthropic
from server.http.ollama_error import speaks_ollama

_SCHEMAS = "#/components/schemas/"
_OWN_ERRORS = ("HTTPValidationError", "ValidationError")  # FastAPI's, which no route answers with
_NULLABLE_STRING = {"type": ["string", "null"]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "description": "What is wrong.",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, for people."},
                "type": {"type": "string", "description": "The kind of error, as the status tells it."},
                "param": {**_NULLABLE_STRING, "description": "The field or header to change."},
                "code": {**_NULLABLE_STRING, "description": "A word for programs, where there is one."},
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error", "description": "Always `error`."},
        "error": {
            "type": "object",
            "description": "What went wrong.",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string", "description": "The kind of error, in Anthropic's words."},
                "message": {"type": "string", "description": "What went wrong, for people."},
            },
        },
        "request_id": {"type": "string", "description": "The request's id, as in the header `request-id`."},
    },
}
_OLLAMA_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "What is wrong, for people."}},
}
_ERROR_SCHEMAS = {
    "Error": _ERROR_SCHEMA,
    "AnthropicError": _ANTHROPIC_ERROR_SCHEMA,
    "OllamaError": _OLLAMA_ERROR_SCHEMA,
}
# What each of these answers with besides, or in place of, JSON.
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
_MORE_CONTENT = dict.fromkeys(
    ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill"), _EVENTS
)
_LINES: dict[str, Any] = {"application/x-ndjson": {}}
_MORE_CONTENT |= dict.fromkeys(("/api/chat", "/api/generate"), _LINES)
_OTHER_CONTENT = {
    "/metrics": {
        "text/plain": {"schema": {"type": "string"}},
        "application/openmetrics-text": {"schema": {"type": "string"}},
    },
    "/v1/files/{file_id}/content": {"application/octet-stream": {}},
}
_IGNORED = {
    "x-slipstream-ignored": {
        "description": "The body's unknown fields, which were ignored, with commas between them. One that "
        "resembles a known field says so: `temprature;did-you-mean=temperature`.",
        "schema": {"type": "string"},
    }
}
_KEY: dict[str, Any] = {
    "key": {"type": "http", "scheme": "bearer", "description": "A key of --api-key or --api-key-file."}
}
_READINESS = frozenset({"/health", "/health/live", "/ping", "/health/ready", "/ready"})


def json_body(kind: type[BaseModel], example: Mapping[str, object] | None = None) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is `kind`, and `example` is one to try."""
    content: dict[str, Any] = {"schema": {"$ref": _SCHEMAS + kind.__name__}}
    if example is not None:
        content["example"] = example
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def describe_bodies(app: FastAPI, *kinds: type[BaseModel], asks_for_key: bool = False) -> None:
    """Have the application's document define `kinds`, which `json_body` refers to, and what is answered.

    Where the server `asks_for_key`, the document says so, and how the key is sent.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        _, found = models_json_schema(
            [(kind, "validation") for kind in kinds], ref_template=_SCHEMAS + "{model}"
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(found.get("$defs", {}), **_ERROR_SCHEMAS)
        for name in _OWN_ERRORS:
            schemas.pop(name, None)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _describe_replies(path, operation["responses"])
                if method == "post" and _reads_json(operation):  # a PATCH refuses what it does not know
                    operation["responses"]["200"]["headers"] = _IGNORED
        _drop_unused(document)
        if asks_for_key:
            document["components"]["securitySchemes"] = _KEY
            document["security"] = [{name: [] for name in _KEY}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _reads_json(operation: dict[str, Any]) -> bool:
    return "application/json" in operation.get("requestBody", {}).get("content", {})


def _drop_unused(document: dict[str, Any]) -> None:
    """Leave out what nothing refers to: pydantic also defines what our own validators make of a value."""
    text, schemas = json.dumps(document), document["components"]["schemas"]
    for name in [name for name in schemas if f'"{_SCHEMAS}{name}"' not in text]:
        del schemas[name]


def _describe_replies(path: str, responses: dict[str, Any]) -> None:
    """The media types of a good reply, and the one shape of every other."""
    responses.pop("422", None)
    content = responses["200"]["content"]
    responses["200"]["content"] = _OTHER_CONTENT.get(path, {**content, **_MORE_CONTENT.get(path, {})})
    name = "AnthropicError" if speaks_anthropic(path) else "OllamaError" if speaks_ollama(path) else "Error"
    error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{name}"}}}
    responses["default"] = {"description": "An error", "content": error}
    if path in _READINESS:
        responses["503"] = {"description": "Not now", "content": content}
