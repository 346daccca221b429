"""From Anthropic's messages, system blocks and tools to a chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine import ToolChoice as ChatChoice
from server.api.anthropic.protocol import (
    FunctionTool,
    HostedTool,
    Message,
    MessageBody,
    MessagesRequest,
    MessagesTurn,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
)
from server.api.anthropic.protocol_blocks import (
    ContentBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    hosted_kinds,
)
from server.api.openai.protocol import ChatMessage
from server.api.openai.protocol_structure import JsonSchemaFormat, ResponseFormat
from server.api.openai.protocol_tools import CalledFunction, FunctionDefinition, ToolCall
from server.api.openai.protocol_tools import Tool as ChatTool
from server.http.errors import invalid, shown

# Claude Code begins its system prompt with this line, which is for Anthropic's accounts and is another one in
# each request: behind it no prompt would find its prefix in the cache.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")


def turn_body(body: MessageBody) -> MessagesTurn:
    """The same request as a chat; its values were checked when the body was read. Raises ApiError."""
    if body.messages[-1].role == "assistant":
        raise invalid(
            "'messages' ends with the assistant's: continuing a message that has begun is not supported.",
            "messages",
        )
    functions = _functions(body.tools or ())
    turn = MessagesTurn.model_construct(
        **{**_thinking(body.thinking), **body.extras()},
        model=body.model,
        messages=chat_messages(body.messages, body.system or ()),
        tools=functions or None,
        tool_choice=_choice(body.tool_choice, bool(functions)),
        parallel_tool_calls=_parallel(body.tool_choice),
        response_format=_response_format(body.format),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        user=body.metadata.get("user_id") if isinstance(body.metadata, dict) else None,
    )
    if isinstance(body, MessagesRequest):
        turn.stream, turn.stop = body.stream, body.stop_sequences
        turn.max_completion_tokens = body.max_tokens
    return turn


def skipped_kinds(body: MessageBody) -> list[str]:
    """The types of blocks and tools that no model here could use, for the reply to name."""
    tools = [f"tools.{tool.type}" for tool in body.tools or () if isinstance(tool, HostedTool)]
    blocks = hosted_kinds(block for message in body.messages for block in message.content)
    return list(dict.fromkeys([*tools, *blocks]))


def chat_messages(messages: Sequence[Message], system: Iterable[TextBlock]) -> list[ChatMessage]:
    """The conversation as a chat has it, the system prompt first and without the billing line."""
    text = system_text(system)
    head = [ChatMessage.model_construct(role="system", content=text)] if text else []
    return [*head, *(each for message in messages for each in _messages_of(message))]


def system_text(blocks: Iterable[TextBlock]) -> str:
    """The system prompt, blocks joined by an empty line."""
    texts = [block.text for block in blocks]
    if texts:
        texts[0] = _BILLING.sub("", texts[0])
    return "\n\n".join(text for text in texts if text)


def _messages_of(message: Message) -> Iterator[ChatMessage]:
    """One message, or several: what tools gave has a role of its own in chats, and comes first."""
    texts = [text for text in map(_text, message.content) if text is not None]
    if message.role == "assistant":
        calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
        content = "".join(texts) if texts else None
        thoughts = "\n".join(each.thinking for each in message.content if isinstance(each, ThinkingBlock))
        yield ChatMessage.model_construct(
            role="assistant", content=content, tool_calls=calls or None, reasoning_content=thoughts or None
        )
        return
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    for block in results:
        yield ChatMessage.model_construct(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
    if texts or not results:
        yield ChatMessage.model_construct(role=message.role, content="\n".join(texts))


def _text(block: ContentBlock) -> str | None:
    if isinstance(block, TextBlock):
        return block.text
    return block if isinstance(block, str) else None


def _call(block: ToolUseBlock) -> ToolCall:
    function = CalledFunction.model_construct(name=block.name, arguments=block.input)
    return ToolCall.model_construct(id=block.id, type="function", function=function)


def _result(block: ToolResultBlock) -> str:
    return f"Error: {block.content}" if block.is_error else block.content


def _thinking(asked: Thinking | None) -> dict[str, Any]:
    """How the model thinks, in the words of chats; `adaptive` and `between_tools` leave it to the model."""
    match asked:
        case Thinking(type="enabled", budget_tokens=budget):
            return {"enable_thinking": True, "thinking_token_budget": budget}
        case Thinking(type="disabled"):
            return {"enable_thinking": False}
    return {}


def _functions(tools: Iterable[Tool]) -> list[ChatTool]:
    made: dict[str, ChatTool] = {}
    for tool in tools:
        if not isinstance(tool, FunctionTool):
            continue
        if tool.name in made:
            raise invalid(f"'tools' has more than one tool named '{shown(tool.name)}'.", "tools")
        definition = FunctionDefinition.model_construct(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        made[tool.name] = ChatTool.model_construct(type="function", function=definition)
    return list(made.values())


def _choice(choice: ToolChoice | None, has_functions: bool) -> ChatChoice | None:
    match choice:
        case ToolChoice(type="any"):
            return ChatChoice("required")
        case ToolChoice(type="tool", name=str(name)):
            return ChatChoice("required", name)
        case ToolChoice(type="tool"):
            raise invalid("'tool_choice.name' is missing.", "tool_choice.name")
        case ToolChoice(type="auto" | "none" as kind) if has_functions:
            return ChatChoice(kind)
    return None


def _parallel(choice: ToolChoice | None) -> bool | None:
    return None if choice is None or not choice.disable_parallel_tool_use else False


def _response_format(form: OutputFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    schema = JsonSchemaFormat.model_construct(name="output", json_schema=form.json_schema, strict=True)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)
