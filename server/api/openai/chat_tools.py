"""From a chat request's `tools` and `tool_choice` to ToolRules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine import ToolChoice, ToolRules, ToolSpec
from server.api.openai.protocol import ChatCompletionRequest
from server.http.errors import invalid


def read_tools(body: ChatCompletionRequest) -> ToolRules | None:
    """What the request's tools come to; None if none may be called. Raises ApiError for a wrong choice."""
    if body.functions or body.function_call is not None:
        return _read_functions(body)
    tools = [tool.spec() for tool in body.tools or ()]
    rules = _rules(tools, body.tool_choice, ("tools", "tool_choice"))
    return (
        rules if rules is None or body.parallel_tool_calls is not False else replace(rules, is_parallel=False)
    )


def _read_functions(body: ChatCompletionRequest) -> ToolRules | None:
    """The same of the older fields, by which a reply makes one call at most."""
    if body.tools or body.tool_choice is not None:
        raise invalid("'functions' and 'tools' both say what may be called: use one of them.", "functions")
    functions = [function.spec() for function in body.functions or ()]
    rules = _rules(functions, body.function_call, ("functions", "function_call"))
    return None if rules is None else replace(rules, is_parallel=False)


def _rules(tools: Sequence[ToolSpec], choice: ToolChoice | None, names: tuple[str, str]) -> ToolRules | None:
    """`names` are those of the two fields."""
    choice = choice or ToolChoice("auto" if tools else "none")
    if not tools and choice.kind != "none":
        raise invalid(f"'{names[1]}' needs '{names[0]}'.", names[1])
    chosen = (choice.allowed or frozenset()) | ({choice.name} if choice.name is not None else frozenset())
    if not chosen <= {tool.name for tool in tools}:
        raise invalid(f"'{names[1]}' names a function that is not among '{names[0]}'.", names[1])
    return None if not tools or choice.kind == "none" else ToolRules(tools, choice)
