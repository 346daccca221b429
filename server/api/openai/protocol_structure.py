"""`response_format` and `structured_outputs`: the form a reply must have, as clients write it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag

from server.api.openai.protocol_values import MAX_SCHEMA_CHARS, BodyPart, Label, check_num_values

T = TypeVar("T")

MAX_CHOICES = MAX_SCHEMA_CHARS // 4  # with quotes and a comma, and they are compiled as one source


def check_schema(schema: T) -> T:
    """A schema that is written out in no time; how long it may be the compiler says."""
    check_num_values(schema)
    return schema


Schema = Annotated[dict[str, Any] | None, AfterValidator(check_schema)]
SchemaOrText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], AfterValidator(check_schema), Tag("<schema>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<schema>"),
]


class JsonSchemaFormat(BodyPart):
    """OpenAI's named schema. It is kept to whatever `strict` says; the texts around it are not read."""

    name: Label
    """A name for the schema. It is not read."""
    description: str | None = None
    """What the schema is for. It is not read."""
    json_schema: Schema = Field(None, alias="schema")
    """The JSON schema that the reply follows."""
    strict: bool | None = None
    """Close the objects of the schema to keys that it does not name, unless it says what they may be. The
    reply follows the schema either way."""


class ResponseFormat(BodyPart):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    """`text` is any text, `json_object` any JSON object, `json_schema` JSON that follows a schema."""
    json_schema: JsonSchemaFormat | None = None
    """The schema, for `json_schema`."""
    object_schema: Schema = Field(None, alias="schema")
    """A schema for `json_object`, as some other servers take it."""
    value: Schema = None
    """Another name for `schema`."""


class StructuredOutputs(BodyPart):
    """vLLM's `structured_outputs`: one of its fields says what the whole reply must be."""

    schema_or_text: SchemaOrText | None = Field(None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """True for any JSON object."""
    regex: str | None = None
    """A regular expression that the whole reply matches."""
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    """Texts of which the reply is one."""
    grammar: str | None = None
    """A context-free grammar, in Lark's notation or in EBNF with `::=` (GBNF)."""
