"""closed_schema: a JSON schema whose objects have no keys but those it names, unless it says otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OPENS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_SUBSCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")  # of which each value is a schema
_DATA = ("const", "enum", "default", "examples")  # which hold values and no schemas


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, closed as OpenAI's `strict` has it; else a model may go on to invent keys.

    Parts of an `allOf` of several stay as they are: each of them alone knows only some of the keys.
    """
    closed = _closed(schema, shared=frozenset(_shared_places(schema)), place="#", is_part=False)
    return dict(closed)


def _closed(value: Any, *, shared: frozenset[str], place: str, is_part: bool) -> Any:
    if isinstance(value, list):
        return [_closed(each, shared=shared, place="", is_part=False) for each in value]
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for key, each in value.items():
        if key in _DATA:
            found[key] = each
        elif key in _SUBSCHEMAS and isinstance(each, Mapping):
            found[key] = {
                name: _closed(one, shared=shared, place=f"{place}/{key}/{name}", is_part=False)
                for name, one in each.items()
            }
        elif key == "allOf" and isinstance(each, list):
            found[key] = [_closed(one, shared=shared, place="", is_part=len(each) > 1) for one in each]
        else:
            found[key] = _closed(each, shared=shared, place="", is_part=False)
    is_open = is_part or place in shared or "allOf" in value or "$ref" in value
    if (
        isinstance(value.get("properties"), Mapping)
        and not is_open
        and not any(key in value for key in _OPENS)
    ):
        found["additionalProperties"] = False
    return found


def _shared_places(schema: Mapping[str, Any]) -> Iterator[str]:
    """Where the parts of an `allOf` refer to."""
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, Mapping):
            parts = value.get("allOf")
            if isinstance(parts, list) and len(parts) > 1:
                yield from (
                    str(each["$ref"]) for each in parts if isinstance(each, Mapping) and "$ref" in each
                )
            pending += value.values()
