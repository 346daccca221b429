"""call_schema: the JSON schema of a call of one of several tools, arguments and all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.tools.tool_spec import ToolSpec


def call_schema(tools: Sequence[ToolSpec], arguments_key: str) -> dict[str, Any]:
    """An object of `name`, then `arguments_key`. Each tool's schema moves to a definition of its own."""
    calls = [_one(tool.name, arguments_key) for tool in tools]
    definitions = {tool.name: moved_schema(tool.schema, f"#/$defs/{tool.name}") for tool in tools}
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _one(name: str, arguments_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments_key: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def moved_schema(value: Any, place: str) -> Any:
    """The schema as it reads at `place` of another one: its references to its own parts follow it there."""
    if isinstance(value, list):
        return [moved_schema(each, place) for each in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: moved_schema(each, place) for key, each in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
