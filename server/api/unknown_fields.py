"""unknown_fields: what a body holds, at any depth, that nothing here reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from server.api.field_words import close_name
from server.http.json_parts import Rest, do_nothing


class UnknownField(NamedTuple):
    """Where it is, `tools[].colour`, and the path of the field that was probably meant, if there is one."""

    path: str
    meant: str | None


def unknown_fields(
    part: BaseModel,
    data: Mapping[str, Any],
    also_known: Collection[str] = (),
    *,
    place: str = "",
    is_deep: bool = True,
    rest: Rest = do_nothing,
) -> Iterator[UnknownField]:
    """The fields of `data`, from which `part` was made, that are not among its own; in the order of `data`.

    `is_deep`: those of the objects inside as well. APIs whose objects have many fields that say nothing here
    have them looked at by their own routes.
    `rest` is called before each part, to let others run.
    Objects that a field takes as they are, such as a schema or metadata, have no unknown fields.
    """
    rest()
    fields = {field.alias or name: name for name, field in type(part).model_fields.items()}
    unread: Collection[str] = getattr(part, "unread", ())
    for key, value in data.items():
        if key not in fields:
            if key not in also_known and key not in unread:
                meant = close_name(key, {*fields, *also_known})
                yield UnknownField(place + key, None if meant is None else place + meant)
            continue
        if not is_deep:
            continue
        found = getattr(part, fields[key])
        if isinstance(found, BaseModel) and isinstance(value, Mapping):
            yield from unknown_fields(found, value, place=f"{place}{key}.", rest=rest)
        elif isinstance(found, list) and isinstance(value, list) and not _holds_numbers(found):
            for one, given in zip(found, value, strict=False):
                if isinstance(one, BaseModel) and isinstance(given, Mapping):
                    yield from unknown_fields(one, given, place=f"{place}{key}[].", rest=rest)


def _holds_numbers(values: list[object]) -> bool:
    """Whether it is one of those that are long: no list holds numbers beside objects."""
    return bool(values) and isinstance(values[0], int)
