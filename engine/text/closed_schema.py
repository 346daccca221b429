"""closed_schema: a JSON schema whose objects have no keys but those it names, unless it says otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OPENS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_SUBSCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")  # of which each value is a schema
_COMBINED = ("allOf", "anyOf", "oneOf")
_NAMING = frozenset(("properties", "$ref", "allOf", "anyOf", "oneOf"))
VALUE_KEYS = ("const", "enum", "default", "examples")  # which hold values and no schemas


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, closed as OpenAI's `strict` has it; else a model may go on to invent keys.

    Parts of an `allOf` of several stay as they are: each of them alone knows only some of the keys. So do
    an object with keys of its own and the alternatives beside them that name further ones.
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
        if key in VALUE_KEYS:
            found[key] = each
        elif key in _SUBSCHEMAS and isinstance(each, Mapping):
            found[key] = {
                name: _closed(one, shared=shared, place=f"{place}/{key}/{name}", is_part=False)
                for name, one in each.items()
            }
        elif key in _COMBINED and isinstance(each, list):
            are_parts = bool(_parts(value, key))
            found[key] = [_closed(one, shared=shared, place="", is_part=are_parts) for one in each]
        else:
            found[key] = _closed(each, shared=shared, place="", is_part=False)
    is_open = is_part or place in shared or "allOf" in value or "$ref" in value
    is_open = is_open or any(_names_more(value, _parts(value, key)) for key in ("anyOf", "oneOf"))
    if (
        isinstance(value.get("properties"), Mapping)
        and not is_open
        and not any(key in value for key in _OPENS)
    ):
        found["additionalProperties"] = False
    return found


def _parts(value: Mapping[str, Any], key: str) -> list[Any]:
    """The schemas under this keyword that share an object with others; none where each is all of it."""
    found = value.get(key)
    if not isinstance(found, list):
        return []
    if key == "allOf":
        return found if len(found) > 1 else []
    names = any(isinstance(each, Mapping) and not each.keys().isdisjoint(_NAMING) for each in found)
    return found if names and "properties" in value else []


def _names_more(value: Mapping[str, Any], parts: list[Any]) -> bool:
    """True if one of the parts names keys that `value` does not, as far as can be seen."""
    return any(
        not each.keys().isdisjoint(_NAMING - {"properties"}) or not _names_of(each) <= _names_of(value)
        for each in parts
        if isinstance(each, Mapping)
    )


def _names_of(value: Mapping[str, Any]) -> set[str]:
    named = value.get("properties")
    return set(named) if isinstance(named, Mapping) else set()


def _shared_places(schema: Mapping[str, Any]) -> Iterator[str]:
    """Where such parts refer to."""
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, Mapping):
            for each in (part for key in _COMBINED for part in _parts(value, key)):
                if isinstance(each, Mapping) and "$ref" in each:
                    yield str(each["$ref"])
            pending += value.values()
