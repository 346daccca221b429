"""Which format a chat template asks the model to write its calls in."""

from __future__ import annotations

from engine.text.tools.json_formats import HERMES, LLAMA3, MISTRAL
from engine.text.tools.tool_format import ToolFormat

# The most telling first: some write the same mark around something else.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "mistral": MISTRAL,
    "hermes": HERMES,
    "llama3": LLAMA3,
}


def find_tools(template: str) -> ToolFormat | None:
    """The format of a template that takes tools; None if it is none of those known here."""
    return next((each for each in TOOL_FORMATS.values() if each.is_of(template)), None)
