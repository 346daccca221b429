"""call_schema: the JSON schema of a call of one of several functions, arguments and all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.openai.protocol_tools import FunctionDefinition


def call_schema(functions: Sequence[FunctionDefinition], arguments_key: str) -> dict[str, Any]:
    """An object of `name`, then `arguments_key`. Each function's schema moves to a definition of its own."""
    calls = [_one(function.name, arguments_key) for function in functions]
    definitions = {
        function.name: _moved(function.schema_of_arguments, f"#/$defs/{function.name}")
        for function in functions
    }
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _one(name: str, arguments_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments_key: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _moved(value: Any, place: str) -> Any:
    """The schema as it reads at `place` of another one: its references to its own parts follow it there."""
    if isinstance(value, list):
        return [_moved(each, place) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each, place) for key, each in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
