"""From the tools of a response to functions of a chat, and from the calls of those back.

A custom tool becomes a function with one text parameter, and a namespace the first part of its tools' names:
chat templates know nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from engine import InputText
from engine import ToolChoice as ChatChoice
from server.api.openai.protocol_tools import FunctionDefinition, Tool
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.protocol_tools import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    HostedTool,
    InputFormat,
    NamedTool,
    NamespaceTool,
    ResponseTool,
)
from server.http.errors import invalid, shown

_INPUT = "input"  # the one parameter of a custom tool
_SEPARATOR = "__"  # between a namespace and a name


@dataclass(frozen=True, slots=True)
class ToolSource:
    """Where a function of the chat comes from."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools that a model here can call. `skipped` are the types of the others, as `tools.TYPE`."""

    functions: list[Tool] = field(default_factory=list)
    sources: dict[str, ToolSource] = field(default_factory=dict)  # by the function's name
    skipped: list[str] = field(default_factory=list)
    echoed: list[dict[str, Any]] = field(default_factory=list)  # as the response shows them

    def source_of(self, function: str) -> ToolSource:
        """What a call of `function` calls."""
        return self.sources.get(function) or ToolSource("function", function)


def flat_name(name: str, namespace: str | None) -> str:
    """The function's name for a tool."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def custom_arguments(text: str) -> dict[str, Any]:
    """The arguments by which a custom tool's function is called with this input."""
    return {_INPUT: text}


def custom_input(arguments: str) -> str:
    """The input in a custom tool's arguments, which a reply may have cut."""
    try:
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:  # models write line breaks as they are, too
        return InputText().feed(arguments).encode("utf-8", "replace").decode()
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""


def read_tool_set(tools: Iterable[ResponseTool]) -> ToolSet:
    """The tools as functions. Raises ApiError when two have one name."""
    found = ToolSet()
    for tool in tools:
        if isinstance(tool, HostedTool):
            found.skipped.append(f"tools.{tool.type}")
            continue
        found.echoed.append(tool.model_dump(exclude_none=True) | _always_shown(tool))
        if isinstance(tool, NamespaceTool):
            found.skipped.extend(f"tools.{each.type}" for each in tool.tools if isinstance(each, HostedTool))
            for each in tool.tools:
                _add(found, each, tool)
        else:
            _add(found, tool, None)
    return found


def _always_shown(tool: FunctionTool | CustomTool | NamespaceTool) -> dict[str, Any]:
    """What OpenAI's response has of a tool even if the request has not."""
    if isinstance(tool, NamespaceTool):
        return {"description": tool.description or ""}
    if isinstance(tool, CustomTool):
        return {}
    return {"parameters": tool.parameters, "strict": bool(tool.strict)}


def _add(
    found: ToolSet, tool: FunctionTool | CustomTool | HostedTool, namespace: NamespaceTool | None
) -> None:
    if isinstance(tool, HostedTool):
        return
    prefix = None if namespace is None else namespace.name
    name = flat_name(tool.name, prefix)
    if name in found.sources:
        raise invalid(f"'tools' has more than one tool named '{shown(name)}'.", "tools")
    about = [namespace.description, tool.description] if namespace is not None else [tool.description]
    if isinstance(tool, CustomTool):
        about.append(_about_format(tool.format))
    # Checked when the body was read; a namespace may make a name longer than clients may write.
    definition = FunctionDefinition.model_construct(
        name=name,
        description="\n\n".join(each for each in about if each) or None,
        parameters=tool.parameters if isinstance(tool, FunctionTool) else _input_schema(tool.format),
        strict=tool.strict if isinstance(tool, FunctionTool) else None,
    )
    found.functions.append(Tool.model_construct(type="function", function=definition))
    kind: Literal["function", "custom"] = "custom" if isinstance(tool, CustomTool) else "function"
    found.sources[name] = ToolSource(kind, tool.name, prefix)


def _about_format(form: InputFormat | None) -> str | None:
    if form is None or form.type == "text" or form.definition is None:
        return None
    return f"The input must follow this grammar ({form.syntax}):\n{form.definition}"


def _input_schema(form: InputFormat | None) -> dict[str, Any]:
    """A call that is forced follows a regular expression; a Lark grammar does not go inside of JSON."""
    text: dict[str, Any] = {"type": "string"}
    if form is not None and form.syntax == "regex" and form.definition:
        text["pattern"] = f"^(?:{form.definition})$"
    return {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }


def choose(body: ResponsesRequest, tools: ToolSet) -> tuple[list[Tool], ChatChoice | None]:
    """The functions that may be called, and the choice among them. Raises ApiError for an unknown one."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {_choice_name(each, tools) for each in choice.tools}
        allowed = [tool for tool in tools.functions if tool.definition.name in names]
        return allowed, ChatChoice(choice.mode) if allowed else None
    if isinstance(choice, NamedTool):
        return tools.functions, ChatChoice("required", _choice_name(choice.model_dump(), tools))
    if not isinstance(choice, str) or not tools.functions:
        # Hosted tools alone are skipped: nothing is left to choose from.
        if choice == "required" and not tools.skipped:
            raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
        return tools.functions, None
    return tools.functions, ChatChoice(choice)


def _choice_name(wanted: dict[str, Any], tools: ToolSet) -> str | None:
    """The function's name for a tool that is named in a choice; None for a hosted one."""
    kind, name = wanted.get("type"), wanted.get("name")
    if kind not in ("function", "custom"):
        return None
    if isinstance(name, str) and name in tools.sources:  # of a tool in no group, or behind its group's
        return name
    for function, source in tools.sources.items():
        if (source.kind, source.name) == (kind, name):
            return function
    raise invalid("'tool_choice' names a tool that is not among 'tools'.", "tool_choice")
