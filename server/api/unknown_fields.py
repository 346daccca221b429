"""unknown_fields: what a body holds, at any depth, that nothing here reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel

from server.api.field_words import close_name
from server.http.json_parts import Rest, do_nothing

MAX_COMPARED = 100  # of a body's names


class UnknownField(NamedTuple):
    """Where it is, `tools[].colour`, and the path of the field that was probably meant, if there is one."""

    path: str
    meant: str | None


def unknown_fields(
    part: BaseModel,
    data: Mapping[str, Any],
    also_known: Collection[str] = (),
    *,
    is_deep: bool = True,
    rest: Rest = do_nothing,
) -> Iterator[UnknownField]:
    """The fields of `data`, from which `part` was made, that are not among its own; in the order of `data`.

    `is_deep`: those of the objects inside as well. APIs whose objects have many fields that say nothing here
    have them looked at by their own routes.
    `rest` is called before each part, to let others run.
    Objects that a field takes as they are, such as a schema or metadata, have no unknown fields.
    """
    return _Search(rest, is_deep).within(part, data, also_known)


@dataclass(slots=True)
class _Search:
    """One look through a body. To compare names takes long: only the first that are unknown are."""

    rest: Rest
    is_deep: bool
    _meant: dict[str, str | None] = field(default_factory=dict, init=False)  # by the path that was sent

    def within(
        self, part: BaseModel, data: Mapping[str, Any], also_known: Collection[str] = (), place: str = ""
    ) -> Iterator[UnknownField]:
        self.rest()
        fields = {info.alias or name: name for name, info in type(part).model_fields.items()}
        unread: Collection[str] = getattr(part, "unread", ())
        for key, value in data.items():
            if key not in fields:
                if key not in also_known and key not in unread:
                    yield UnknownField(place + key, self._meant_by(place, key, {*fields, *also_known}))
                continue
            if not self.is_deep:
                continue
            found = getattr(part, fields[key])
            if isinstance(found, BaseModel) and isinstance(value, Mapping):
                yield from self.within(found, value, place=f"{place}{key}.")
            elif isinstance(found, list) and isinstance(value, list) and not _holds_numbers(found):
                for one, given in zip(found, value, strict=False):
                    if isinstance(one, BaseModel) and isinstance(given, Mapping):
                        yield from self.within(one, given, place=f"{place}{key}[].")

    def _meant_by(self, place: str, key: str, known: Collection[str]) -> str | None:
        path = place + key
        if path not in self._meant and len(self._meant) < MAX_COMPARED:
            name = close_name(key, known)
            self._meant[path] = None if name is None else place + name
        return self._meant.get(path)


def _holds_numbers(values: list[object]) -> bool:
    """Whether it is one of those that are long: no list holds numbers beside objects."""
    return bool(values) and isinstance(values[0], int)
