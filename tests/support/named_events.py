"""Named server-sent events as they came over the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel


@dataclass(frozen=True)
class NamedEvent:
    """One event: its name, and its JSON."""

    name: str
    payload: dict[str, Any]


def named_events(body: bytes) -> list[NamedEvent]:
    """Every event of a stream; comments are left out."""
    found = []
    for part in body.split(b"\n\n"):
        if not part or part.startswith(b":"):
            continue
        name, data = part.split(b"\n")
        assert name.startswith(b"event: ") and data.startswith(b"data: "), part
        found.append(NamedEvent(name[7:].decode(), json.loads(data[6:])))
    return found


def types_by_name(union: Any) -> dict[str, type[BaseModel]]:
    """The types in an official client's union of events, each by the event's name."""
    kinds = get_args(get_args(union)[0])
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}
