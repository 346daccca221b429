"""What a request says about tools: ToolSpec, ToolChoice and ToolRules, in the words of no API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.text.structured_output import StructuredOutput

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FREE_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call.

    `parameters` is the JSON schema of its arguments; None: it takes none. `is_strict`: its arguments match
    the schema however it is called. A `is_custom` tool takes free text in place of arguments, of the form
    `form` if there is one; models call it like a function with the one argument `input`.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    is_custom: bool = False
    form: StructuredOutput | None = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments."""
        if self.is_custom:
            return _FREE_INPUT
        return NO_PARAMETERS if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it, with the fields that they know."""
        shown: dict[str, object] = {"name": self.name}
        if self.description is not None:
            shown["description"] = self.description
        own = _FREE_INPUT if self.is_custom else self.parameters or {}
        shown["parameters"] = {"type": "object", "properties": {}, **own}
        return {"type": "function", "function": shown}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools: never, as it likes, or at least one; `name`: exactly this one."""

    kind: Literal["none", "auto", "required"]
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """True when the reply is made of calls and nothing else."""
        return self.kind == "required"


@dataclass(frozen=True, slots=True)
class ToolRules:
    """A request whose reply may call `tools`; without `is_parallel` one of them, once."""

    tools: Sequence[ToolSpec]
    choice: ToolChoice = ToolChoice("auto")
    is_parallel: bool = True

    @property
    def callable_tools(self) -> list[ToolSpec]:
        """Those that the choice leaves."""
        return [tool for tool in self.tools if self.choice.name in (None, tool.name)]

    @property
    def takes_several(self) -> bool:
        """True when a reply may hold more than one call."""
        return self.is_parallel and self.choice.name is None
