"""The calls of one request as grammars hold them amid text: the parts that the families' formats share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.structured_output import CallForm, CallForms, CallPart, Pattern, Repeated, StructuredOutput
from engine.text.tools.tool_spec import INPUT_KEY, ToolSpec

SPACE = Pattern("[ \\n]{0,2}")
# A grammar's text is written as it is, though it stands where a JSON string would.
RAW_HEAD = f'{{"{INPUT_KEY}": "'
RAW_TAIL = '"}'


def json_value(schema: Mapping[str, Any]) -> StructuredOutput:
    """JSON of this schema."""
    return StructuredOutput("json_schema", json.dumps(schema))


def grammar_of(tool: ToolSpec) -> StructuredOutput | None:
    """The grammar that the input of a custom tool follows; None for a tool whose arguments are JSON."""
    return tool.form if tool.form is not None and tool.form.kind == "grammar" else None


def arguments_object(tool: ToolSpec, before: str, after: str) -> tuple[tuple[CallPart, ...], bool]:
    """Arguments as a JSON object between two texts, and whether the reply ends behind them.

    It does behind a grammar's text, which may hold whatever ends a call.
    """
    grammar = grammar_of(tool)
    if grammar is None:
        return (before, json_value(tool.schema), after), False
    return (before + RAW_HEAD, grammar, RAW_TAIL + after), True


def named_objects(
    tools: Sequence[ToolSpec], openings: Sequence[str], key: str, after: str, *, in_lists: bool = False
) -> CallForms:
    """Calls as JSON objects of a name and arguments; with `in_lists` a list of them may stand there, too."""
    lists = _named_lists(tools, openings, key) if in_lists else ()
    return CallForms(
        tuple(
            CallForm(opening, (SPACE, *parts), is_last)
            for tool in tools
            for parts, is_last in (arguments_object(tool, named_head(tool, key), "}" + after),)
            for opening in openings
        )
        + tuple(lists)
    )


def _named_lists(tools: Sequence[ToolSpec], openings: Sequence[str], key: str) -> list[CallForm]:
    """Lists of calls behind each opening, but of those that end the reply."""
    calls = [
        parts
        for tool in tools
        for parts, is_last in (arguments_object(tool, named_head(tool, key), "}"),)
        if not is_last
    ]
    more = Repeated(tuple((", ", *call) for call in calls), None)
    return [CallForm(opening, (SPACE, "[", *call, more, "]")) for call in calls for opening in openings]


def named_head(tool: ToolSpec, key: str) -> str:
    """What such an object begins with."""
    return f'{{"name": "{tool.name}", "{key}": '


def needs_keeping(tools: Sequence[ToolSpec]) -> bool:
    """True if any of the tools is to be called in its own form only."""
    return any(tool.is_strict or tool.form is not None for tool in tools)


def property_schemas(tool: ToolSpec) -> dict[str, tuple[Mapping[str, Any], bool]] | None:
    """The schema of each argument, and whether it is required; None where the schema does not name them all.

    An argument's schema holds the definitions that it refers to.
    """
    schema = tool.schema
    properties = schema.get("properties")
    if not (tool.is_strict or tool.is_custom) or not isinstance(properties, dict):
        return None
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    named = schema.get("required")
    required = named if isinstance(named, list) else ()
    found: dict[str, tuple[Mapping[str, Any], bool]] = {}
    for key, each in properties.items():
        own: Mapping[str, Any] = each if isinstance(each, dict) else {}
        refers = '"$ref"' in json.dumps(own)
        found[key] = ({**shared, **own} if refers else own, key in required)
    return found
