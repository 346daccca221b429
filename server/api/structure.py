"""From a request's `response_format` and `structured_outputs` to the one form that its reply must have."""

from __future__ import annotations

import json

from engine import StructuredOutput, closed_schema
from server.api.openai.protocol import GenerationBody
from server.api.openai.protocol_structure import ResponseFormat, StructuredOutputs
from server.http.errors import invalid

_ONE_KIND = "'structured_outputs' must hold exactly one of json, json_object, regex, choice and grammar."


def read_structure(body: GenerationBody) -> StructuredOutput | None:
    """What is asked for; None for any text. Raises ApiError for none of several kinds, or several."""
    from_format = None if body.response_format is None else _from_format(body.response_format)
    if body.structured_outputs is None:
        return from_format
    if from_format is not None:
        raise invalid(
            "'structured_outputs' and 'response_format' both ask for a form: use one of them.",
            "structured_outputs",
        )
    return _from_outputs(body.structured_outputs)


def _from_format(form: ResponseFormat) -> StructuredOutput | None:
    if form.type != "json_schema":
        if form.json_schema is not None:
            raise invalid(
                "'response_format.json_schema' needs 'type': 'json_schema'.", "response_format.json_schema"
            )
        return None if form.type == "text" else _object_of(form)
    if form.json_schema is None:
        raise invalid("'response_format.json_schema' is missing.", "response_format.json_schema")
    name = "response_format.json_schema.schema"
    if form.json_schema.json_schema is None:
        raise invalid(f"'{name}' is missing.", name)
    schema = form.json_schema.json_schema
    shown = closed_schema(schema) if form.json_schema.strict else schema
    return StructuredOutput("json_schema", json.dumps(shown), param=name)


def _object_of(form: ResponseFormat) -> StructuredOutput:
    """Any JSON object, or one of a schema that came beside the type."""
    for name, schema in (("schema", form.object_schema), ("value", form.value)):
        if schema is not None:
            return StructuredOutput("json_schema", json.dumps(schema), param=f"response_format.{name}")
    return StructuredOutput("json_object", param="response_format")


def _from_outputs(outputs: StructuredOutputs) -> StructuredOutput:
    found: list[StructuredOutput] = []
    if outputs.schema_or_text is not None:
        schema = outputs.schema_or_text
        source = schema if isinstance(schema, str) else json.dumps(schema)
        found.append(StructuredOutput("json_schema", source, param="structured_outputs.json"))
    if outputs.json_object:
        found.append(StructuredOutput("json_object", param="structured_outputs.json_object"))
    if outputs.regex is not None:
        found.append(StructuredOutput("regex", outputs.regex, param="structured_outputs.regex"))
    if outputs.choice is not None:
        choices = json.dumps(outputs.choice)
        found.append(StructuredOutput("choice", choices, param="structured_outputs.choice"))
    if outputs.grammar is not None:
        found.append(StructuredOutput("grammar", outputs.grammar, param="structured_outputs.grammar"))
    if len(found) != 1:
        raise invalid(_ONE_KIND, "structured_outputs")
    return found[0]
