"""Tools for models whose chat template knows none: definitions, calls and results as plain messages.

The words are those of the hermes format, which small models follow best; what they write is read as that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.text.joined_users import joined_users

_PREAMBLE = (
    "You may call one or more of these functions to help the user. They are described within "
    "<tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call, write a JSON object with the name of the "
    "function and its arguments within <tool_call></tool_call>:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def mentions_tools(messages: Sequence[Mapping[str, object]]) -> bool:
    """True for a conversation that holds calls or their results."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def plain_messages(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """The same conversation in messages of system, user and assistant only, with the tools in the first."""
    plain: list[dict[str, object]] = []
    if tools:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        plain.append({"role": "system", "content": _PREAMBLE.format(tools=described)})
    for message in messages:
        _append(plain, message, is_first=message is messages[0])
    return plain


def ways_to_show(
    plain: Sequence[Mapping[str, object]],
) -> Iterator[Sequence[Mapping[str, object]]]:
    """Such messages, and what is tried in their place where the template refuses them."""
    has_system = plain[0]["role"] == "system"
    for shown in (plain, _without_system(plain)) if has_system else (plain,):
        yield shown
        joined = joined_users(shown)
        if len(joined) < len(shown):
            yield joined


def _without_system(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The same with the first message, a system's, put before the user's: some templates take no system."""
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *map(dict, rest)]
    content = f"{system['content']}\n\n{rest[0]['content']}"
    return [{**rest[0], "content": content}, *map(dict, rest[1:])]


def with_quoted_arguments(message: Mapping[str, Any]) -> Mapping[str, object]:
    """The same message with the arguments of its calls as JSON text, which some templates take."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_quoted_arguments(call) for call in calls]}


def _with_quoted_arguments(call: Mapping[str, Any]) -> dict[str, object]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _append(plain: list[dict[str, object]], message: Mapping[str, object], *, is_first: bool) -> None:
    role, content = message["role"], str(message.get("content") or "")
    if role == "system" and is_first and plain:
        plain[0]["content"] = f"{content}\n\n{plain[0]['content']}"
    elif role == "tool":
        shown = f"<tool_response>\n{content}\n</tool_response>"
        if plain and plain[-1].get("name") == "tool":
            plain[-1]["content"] = f"{plain[-1]['content']}\n{shown}"
        else:
            plain.append({"role": "user", "name": "tool", "content": shown})
    elif calls := message.get("tool_calls"):
        written = [content] if content else []
        written += map(_written_call, calls if isinstance(calls, list) else ())
        plain.append({"role": role, "content": "\n".join(written)})
    else:
        plain.append(dict(message))


def _written_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
