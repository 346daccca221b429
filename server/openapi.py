"""The OpenAPI document's account of the bodies that routes read for themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_SCHEMAS = "#/components/schemas/"


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is `kind`."""
    schema = {"$ref": _SCHEMAS + kind.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, *kinds: type[BaseModel]) -> None:
    """Have the application's document define `kinds`, which `json_body` refers to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, found = models_json_schema(
            [(kind, "validation") for kind in kinds], ref_template=_SCHEMAS + "{model}"
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(found.get("$defs", {}))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
