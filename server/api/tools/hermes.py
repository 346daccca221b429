"""Hermes, Qwen and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one a call."""

from __future__ import annotations

from typing import Any

from engine import Frame, StructuredOutput
from server.api.tools.family import ToolFamily, forced_calls
from server.api.tools.marked import CallMarks

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _forced(call: dict[str, Any], most: int) -> StructuredOutput:
    return forced_calls(call, Frame(f"{_OPENING}\n", f"\n{_CLOSING}", "\n", most))


HERMES = ToolFamily(
    name="hermes",
    signs=(_OPENING,),
    marks=CallMarks(_OPENING, _CLOSING),
    arguments_key="arguments",
    forced=_forced,
)
