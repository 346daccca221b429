"""From Ollama's bodies to a chat turn, or to a completion where no chat is meant."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any

from server.api.ollama.protocol import (
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaText,
    OllamaToolCall,
    OllamaTurn,
)
from server.api.openai.protocol import ChatMessage
from server.api.openai.protocol_structure import JsonSchemaFormat, ResponseFormat
from server.api.openai.protocol_tools import CalledFunction, ToolCall
from server.http.errors import invalid


def chat_turn(body: OllamaChatRequest | OllamaGenerateRequest, model: str) -> OllamaTurn:
    """The same request as a chat with `model`. Raises ApiError."""
    turn = OllamaTurn.model_construct(**_common(body, model), **_thinking(body))
    if isinstance(body, OllamaGenerateRequest):
        head = [ChatMessage.model_construct(role="system", content=body.system)] if body.system else []
        turn.messages = [*head, ChatMessage.model_construct(role="user", content=body.prompt)]
        return turn
    messages = body.messages or []
    if messages[-1].role == "assistant":
        raise invalid(
            "'messages' ends with the assistant's: continuing a message that has begun is not supported.",
            "messages",
        )
    turn.messages, turn.tools = chat_messages(messages), body.tools
    return turn


def text_turn(body: OllamaGenerateRequest, model: str) -> OllamaText:
    """The same request as a completion of its prompt. Raises ApiError."""
    if body.think:
        raise invalid("'think' needs a chat: leave 'raw' and 'suffix' out.", "think")
    if body.system:
        raise invalid("'system' needs a chat: leave 'raw' and 'suffix' out.", "system")
    return OllamaText.model_construct(**_common(body, model), prompt=[body.prompt or ""], suffix=body.suffix)


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The conversation as a chat has it, where each result names its call by an id."""
    open_calls = _OpenCalls()
    found = []
    for i, message in enumerate(messages):
        calls = [_call(each, f"call_{i}_{j}") for j, each in enumerate(message.tool_calls or ())]
        made = ChatMessage.model_construct(
            role=message.role,
            content=message.content or "",
            reasoning_content=message.thinking,
            tool_calls=calls or None,
        )
        if message.role == "tool":
            made.tool_call_id = open_calls.answered(message) or f"call_{i}"
        for call in calls:
            open_calls.add(call)
        found.append(made)
    return found


def _call(call: OllamaToolCall, own_id: str) -> ToolCall:
    function = CalledFunction.model_construct(name=call.function.name, arguments=call.function.arguments)
    return ToolCall.model_construct(id=call.id or own_id, type="function", function=function)


class _OpenCalls:
    """Calls without a result, found by id, by name, by both, or as the next: long conversations have many."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str | None, str | None], deque[tuple[int, ToolCall]]] = {}
        self._num_calls = 0
        self._taken: set[int] = set()

    def add(self, call: ToolCall) -> None:
        """One more."""
        name = None if call.function is None else call.function.name
        for key in product({None, call.id}, {None, name}):
            self._waiting.setdefault(key, deque()).append((self._num_calls, call))
        self._num_calls += 1

    def answered(self, message: OllamaMessage) -> str | None:
        """The id of the first call that a tool's message may answer, which is taken; else its own."""
        waiting = self._waiting.get((message.tool_call_id, message.tool_name))
        while waiting:
            number, call = waiting.popleft()
            if number not in self._taken:
                self._taken.add(number)
                return call.id
        return message.tool_call_id


def _common(body: OllamaBody, model: str) -> dict[str, Any]:
    options = {} if body.options is None else body.options.fields()
    form = _response_format(body.format)
    return {**options, **body.extras(), "model": model, "stream": body.streams, "response_format": form}


def _thinking(body: OllamaBody) -> dict[str, Any]:
    if isinstance(body.think, str):
        return {"enable_thinking": True, "reasoning_effort": body.think}
    return {} if body.think is None else {"enable_thinking": body.think}


def _response_format(asked: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not asked and not isinstance(asked, dict):
        return None
    if isinstance(asked, str):
        return ResponseFormat.model_construct(type="json_object")
    schema = JsonSchemaFormat.model_construct(name="output", json_schema=asked, strict=True)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)
