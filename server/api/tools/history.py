"""Messages and tools as a chat template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import Engine
from server.api.openai.protocol import ChatMessage
from server.api.openai.protocol_tools import Tool
from server.api.tools.families import family_of
from server.api.tools.family import ToolFamily
from server.http.errors import invalid


@dataclass(frozen=True, slots=True)
class Conversation:
    """The part of a request that a chat template shows."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] | None


def tool_template(asked: Conversation, engine: Engine) -> str | None:
    """The model's chat template for tools; None if it has none, or `asked` has nothing to do with tools.

    Raises Overloaded while the model loads, and ApiError for what no template would show.
    """
    has_calls = any(message.tool_calls or message.tool_call_id for message in asked.messages)
    if not asked.tools and not has_calls:
        return None
    template = engine.tool_template
    if template is not None:
        return template
    if asked.tools:
        raise invalid(
            "This model's chat template takes no tools: leave 'tools' out, "
            "or start the server with a --chat-template that uses them.",
            "tools",
        )
    for i, message in enumerate(asked.messages):
        if message.tool_calls:
            name = f"messages[{i}].tool_calls"
            raise invalid("This model's chat template takes no tools, so no tool calls either.", name)
    return None


def messages_for_template(messages: Sequence[ChatMessage], template: str | None) -> list[dict[str, object]]:
    """What the chat template sees of a conversation. Raises ApiError for what it could not be shown."""
    family = None if template is None else family_of(template)
    return [_message(i, message, family) for i, message in enumerate(messages)]


def _message(index: int, message: ChatMessage, family: ToolFamily | None) -> dict[str, object]:
    if message.tool_calls and message.role != "assistant":
        name = f"messages[{index}].tool_calls"
        raise invalid(f"'{name}' is out of place: only an assistant's message may have calls.", name)
    if message.content is None and message.role != "assistant":
        name = f"messages[{index}].content"
        raise invalid(f"'{name}' is missing: only an assistant's message may have none.", name)
    if message.role == "tool" and not message.tool_call_id:
        name = f"messages[{index}].tool_call_id"
        raise invalid(f"'{name}' is missing: a tool's message names the call that it answers.", name)
    # Templates know the older name of the role.
    shown: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content or "",
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = _shown_id(message.tool_call_id, family)
    if message.tool_calls:
        shown["tool_calls"] = [_with_shown_id(call.for_template(), family) for call in message.tool_calls]
    return shown


def _with_shown_id(call: dict[str, Any], family: ToolFamily | None) -> dict[str, Any]:
    return {**call, "id": _shown_id(call["id"], family)} if "id" in call else call


def _shown_id(call_id: str, family: ToolFamily | None) -> str:
    return call_id if family is None else family.shown_id(call_id)
