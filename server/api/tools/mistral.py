"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, all calls in one list."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from engine import Frame, StructuredOutput
from server.api.tools.family import ToolFamily, forced_calls
from server.api.tools.marked import CallMarks

_OPENING = "[TOOL_CALLS]"
_ID_CHARS = 9


def _forced(call: dict[str, Any], most: int) -> StructuredOutput:
    """One list of all calls."""
    definitions = call.pop("$defs")
    calls = {"type": "array", "items": call, "minItems": 1, "maxItems": most, "$defs": definitions}
    return forced_calls(calls, Frame(_OPENING))


def _shown_id(call_id: str) -> str:
    """Its templates take ids of nine letters and digits only, so others become such ones."""
    if len(call_id) == _ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:_ID_CHARS]


MISTRAL = ToolFamily(
    name="mistral",
    signs=(_OPENING,),
    marks=CallMarks(_OPENING, "]", "[", ","),
    arguments_key="arguments",
    forced=_forced,
    shown_id=_shown_id,
)
