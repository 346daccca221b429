"""`response_format` and `structured_outputs`: the form a reply must have, as clients write it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from server.api.openai.protocol_values import MAX_SCHEMA_CHARS, Label, check_num_values

T = TypeVar("T")

MAX_CHOICES = MAX_SCHEMA_CHARS // 4  # with quotes and a comma, and they are compiled as one source


def check_schema(schema: T) -> T:
    """A schema that is written out in no time; how long it may be the compiler says."""
    check_num_values(schema)
    return schema


Schema = Annotated[dict[str, Any] | None, AfterValidator(check_schema)]
SchemaOrText = Annotated[dict[str, Any] | str | None, AfterValidator(check_schema)]


class JsonSchemaFormat(BaseModel):
    """OpenAI's named schema. It is kept to whatever `strict` says; the texts around it are not read."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Label
    description: str | None = None
    json_schema: Schema = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one of its fields says what the whole reply must be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_or_text: SchemaOrText = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None
