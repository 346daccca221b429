"""What a request says about tools: ToolSpec, ToolChoice and ToolRules, in the words of no API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.text.closed_schema import closed_schema
from engine.text.structured_output import StructuredOutput

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
INPUT_KEY = "input"  # the one argument by which a custom tool is called


def _input_schema(text: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT_KEY: text},
        "required": [INPUT_KEY],
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
        """The schema of its arguments: closed where it is strict."""
        if self.is_custom:
            is_regex = self.form is not None and self.form.kind == "regex"
            pattern = {"pattern": f"^(?:{self.form.source})$"} if is_regex and self.form is not None else {}
            return _input_schema({"type": "string", **pattern})
        own = NO_PARAMETERS if self.parameters is None else self.parameters
        return closed_schema(own) if self.is_strict else own

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it, with the fields that they know."""
        shown: dict[str, object] = {"name": self.name}
        about = [self.description, self._about_form()]
        if any(about):
            shown["description"] = "\n\n".join(each for each in about if each)
        own = _input_schema({"type": "string"}) if self.is_custom else self.parameters or {}
        shown["parameters"] = {"type": "object", "properties": {}, **own}
        return {"type": "function", "function": shown}

    def _about_form(self) -> str | None:
        if self.form is None:
            return None
        notation = "regular expression" if self.form.kind == "regex" else "Lark grammar"
        return f"The input must follow this {notation}:\n{self.form.source}"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools: never, as it likes, or at least one; `name`: exactly this one.

    `allowed` are the only ones that it may call; None: all of them.
    """

    kind: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: frozenset[str] | None = None

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
        name, allowed = self.choice.name, self.choice.allowed
        named = [tool for tool in self.tools if name in (None, tool.name)]
        return [tool for tool in named if allowed is None or tool.name in allowed]

    @property
    def sole_form(self) -> StructuredOutput | None:
        """The grammar of a custom tool, where the reply has to be a call of that tool and of no other.

        Such a reply is the input itself: a grammar does not go inside of a format's JSON.
        """
        tools = self.callable_tools
        if not self.choice.is_forced or len(tools) != 1 or tools[0].form is None:
            return None
        return tools[0].form if tools[0].form.kind == "grammar" else None

    @property
    def takes_several(self) -> bool:
        """True when a reply may hold more than one call."""
        return self.is_parallel and self.choice.name is None
