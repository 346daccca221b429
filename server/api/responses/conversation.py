"""From the items of a response's input to the messages of a chat."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field

from server.api.openai.protocol import ChatMessage
from server.api.openai.protocol_tools import CalledFunction, ToolCall
from server.api.openai.protocol_values import Role
from server.api.responses.protocol_items import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)
from server.api.responses.tools import custom_arguments, flat_name

_SYSTEM_ROLES = ("system", "developer")
_ENCODED = "slipstream:"


def messages_of(items: Iterable[InputItem], instructions: str | None = None) -> list[ChatMessage]:
    """The conversation as a chat has it.

    What the assistant said, thought and called between two others is one message. Instructions, and system
    and developer messages before all others, are one system message; later ones stay where they are.
    """
    made = _Messages()
    if instructions:
        made.head.append(instructions)
    for item in items:
        made.add(item)
    return made.all()


@dataclass(slots=True)
class _Assistant:
    """One message of the assistant as it is put together."""

    thoughts: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> ChatMessage:
        return ChatMessage.model_construct(
            role="assistant",
            content="\n".join(self.content) if self.content else None,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.thoughts) or None,
        )


@dataclass(slots=True)
class _Messages:
    head: list[str] = field(default_factory=list)
    made: list[ChatMessage] = field(default_factory=list)
    assistant: _Assistant | None = None

    def add(self, item: InputItem) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._reply().content.append(item.content)
            case MessageItem():
                self._say(item.role, item.content)
            case FunctionCallItem():
                self._call(
                    item,
                    CalledFunction.model_construct(
                        name=flat_name(item.name, item.namespace), arguments=item.arguments
                    ),
                )
            case CustomCallItem():
                self._call(
                    item,
                    CalledFunction.model_construct(
                        name=flat_name(item.name, item.namespace), arguments=custom_arguments(item.input)
                    ),
                )
            case CallOutputItem():
                self._end_assistant()
                self.made.append(
                    ChatMessage.model_construct(role="tool", content=item.output, tool_call_id=item.call_id)
                )
            case ReasoningItem():
                self._reply().thoughts.append(thoughts_of(item))
            case _:
                pass

    def all(self) -> list[ChatMessage]:
        self._end_assistant()
        if not self.head:
            return self.made
        return [ChatMessage.model_construct(role="system", content="\n\n".join(self.head)), *self.made]

    def _say(self, role: Role, content: str) -> None:
        self._end_assistant()
        if role in _SYSTEM_ROLES and not self.made:
            self.head.append(content)
        else:
            self.made.append(ChatMessage.model_construct(role=role, content=content))

    def _call(self, item: FunctionCallItem | CustomCallItem, function: CalledFunction) -> None:
        call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
        self._reply().calls.append(call)

    def _reply(self) -> _Assistant:
        self.assistant = self.assistant or _Assistant()
        return self.assistant

    def _end_assistant(self) -> None:
        if self.assistant is not None:
            self.made.append(self.assistant.message())
            self.assistant = None


def text_length(item: InputItem) -> int:
    """Characters of an item of output that are put together with others, as arguments of calls never are."""
    return len(item.content) if isinstance(item, MessageItem | ReasoningItem) else 0


def thoughts_of(item: ReasoningItem) -> str:
    """The text of earlier thoughts; of another server's encrypted ones only a summary is left."""
    return item.content or decoded(item.encrypted_content or "") or item.summary


def encoded(thoughts: str) -> str:
    """Thoughts in the form in which a client that stores nothing gives them back. It hides nothing."""
    return _ENCODED + base64.b64encode(thoughts.encode("utf-8", "replace")).decode("ascii")


def decoded(text: str) -> str:
    """What `encoded` was given; empty for anything else."""
    if not text.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_ENCODED), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""
