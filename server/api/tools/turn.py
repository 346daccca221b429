"""ToolTurn: what tools mean for one request, from the prompt to the reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import StructuredOutput
from server.api.openai.protocol import ChatCompletionRequest
from server.api.openai.protocol_tools import FunctionDefinition, Tool, ToolChoice
from server.api.tools.call_schema import call_schema
from server.api.tools.families import family_of
from server.api.tools.family import ToolFamily
from server.api.tools.forced import ForcedReader
from server.api.tools.marked import MarkedReader
from server.api.tools.pieces import CallReader
from server.http.errors import invalid

MAX_FORCED_CALLS = 16
_UNLIMITED = 1 << 31


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """A request whose reply may call tools."""

    family: ToolFamily
    tools: Sequence[Tool]
    choice: ToolChoice
    is_parallel: bool

    @property
    def for_template(self) -> list[dict[str, object]]:
        """The tools as the chat template shows them to the model."""
        return [tool.for_template() for tool in self.tools]

    def reader(self) -> CallReader:
        """For one reply."""
        if self.choice.is_forced:
            return ForcedReader()
        names = {tool.function.name for tool in self.tools}
        return MarkedReader(self.family.marks, names, _UNLIMITED if self.is_parallel else 1)

    def structure(self) -> StructuredOutput | None:
        """The form that a reply must have; None when it may be anything."""
        if not self.choice.is_forced:
            return None
        several = self.choice.kind == "required" and self.is_parallel
        schema = call_schema(self._callable(), self.family.arguments_key)
        return self.family.forced(schema, MAX_FORCED_CALLS if several else 1)

    def _callable(self) -> list[FunctionDefinition]:
        functions = [tool.function for tool in self.tools]
        named = self.choice.name
        return [each for each in functions if named is None or each.name == named]


def check_tool_fields(body: ChatCompletionRequest) -> ToolChoice:
    """The choice in force. Raises ApiError for one that does not go with the tools."""
    tools, choice = body.tools or (), body.tool_choice or ToolChoice("auto" if body.tools else "none")
    if not tools and choice.kind != "none":
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
    if choice.name is not None and all(tool.function.name != choice.name for tool in tools):
        raise invalid("'tool_choice' names a function that is not among 'tools'.", "tool_choice")
    return choice


def read_tools(body: ChatCompletionRequest, template: str | None) -> ToolTurn | None:
    """What the request's tools come to, with the model's template for them; None if none may be called.

    Raises ApiError.
    """
    choice = check_tool_fields(body)
    if not body.tools or choice.kind == "none" or template is None:
        return None
    _check_form(body)
    family = family_of(template)
    if family is None:
        raise invalid(
            "This model's chat template asks for tool calls in a format that is not supported.", "tools"
        )
    return ToolTurn(family, body.tools, choice, body.parallel_tool_calls is not False)


def _check_form(body: ChatCompletionRequest) -> None:
    """Refuse a second form beside that of calls: a reply that must follow it could not call anything."""
    has_format = body.response_format is not None and body.response_format.type != "text"
    name = "response_format" if has_format else "structured_outputs"
    if has_format or body.structured_outputs is not None:
        raise invalid(f"'{name}' cannot be used with 'tools', unless 'tool_choice' is 'none'.", name)
