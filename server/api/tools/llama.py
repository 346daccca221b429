"""Llama 3: the reply is `{"name": ..., "parameters": {...}}`, or that comes behind `<|python_tag|>`."""

from __future__ import annotations

from typing import Any

from engine import StructuredOutput
from server.api.tools.family import ToolFamily, forced_calls
from server.api.tools.marked import CallMarks

_OPENING = "<|python_tag|>"


def _forced(call: dict[str, Any], most: int) -> StructuredOutput:
    """One call: that is all its templates take back."""
    return forced_calls(call)


LLAMA = ToolFamily(
    name="llama",
    # Small models of the family have no tag; the prompt describes the format in words.
    signs=(_OPENING, '"parameters": dictionary of argument name'),
    marks=CallMarks(_OPENING, between=";", bare=True),
    arguments_key="parameters",
    forced=_forced,
)
