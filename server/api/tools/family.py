"""ToolFamily: how the chat templates of one family of models have calls written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine import Frame, StructuredOutput
from server.api.tools.marked import CallMarks


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """One family. A template is of it that holds one of `signs`.

    `arguments_key` is its name for a call's arguments. `forced` makes the form of a reply out of the schema
    of one call and the most calls there may be. `shown_id` is how its templates want the id of a call.
    """

    name: str
    signs: tuple[str, ...]
    marks: CallMarks
    arguments_key: str
    forced: Callable[[dict[str, Any], int], StructuredOutput]
    shown_id: Callable[[str], str] = str


def forced_calls(schema: dict[str, Any], frame: Frame | None = None) -> StructuredOutput:
    """A reply of calls and nothing else: JSON by `schema` in its frame of text."""
    return StructuredOutput("json_schema", json.dumps(schema), frame, "tools")
