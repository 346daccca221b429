"""From a chat request's `tools` and `tool_choice` to ToolRules."""

from __future__ import annotations

from engine import ToolChoice, ToolRules
from server.api.openai.protocol import ChatCompletionRequest
from server.http.errors import invalid


def read_tools(body: ChatCompletionRequest) -> ToolRules | None:
    """What the request's tools come to; None if none may be called. Raises ApiError for a wrong choice."""
    tools = [tool.spec() for tool in body.tools or ()]
    choice = body.tool_choice or ToolChoice("auto" if tools else "none")
    if not tools and choice.kind != "none":
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
    if choice.name is not None and all(tool.name != choice.name for tool in tools):
        raise invalid("'tool_choice' names a function that is not among 'tools'.", "tool_choice")
    if not tools or choice.kind == "none":
        return None
    return ToolRules(tools, choice, body.parallel_tool_calls is not False)
