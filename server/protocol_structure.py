"""`response_format` and `structured_outputs`: the form a reply must have, as clients write it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.protocol_values import Label


class JsonSchemaFormat(BaseModel):
    """OpenAI's named schema. It is kept to whatever `strict` says; the texts around it are not read."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Label
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one of its fields says what the whole reply must be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_or_text: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
