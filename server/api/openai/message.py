"""Pieces of a reply as OpenAI's messages and deltas show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import CallArguments, CallEnd, CallStart, CollectedReply, ContentText, Piece, ReasoningText


def deltas_of(pieces: Sequence[Piece]) -> list[dict[str, object]]:
    """The `delta` of each chunk of a stream that shows these pieces."""
    return [delta for piece in pieces if (delta := _delta_of(piece)) is not None]


def _delta_of(piece: Piece) -> dict[str, object] | None:
    match piece:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, name, call_id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


def message_of(reply: CollectedReply, *, thinks: bool) -> dict[str, object]:
    """The whole message; `content` is null where there are calls, or thoughts, and no more.

    `thinks` says that the model may think: then the message tells its reasoning, null where there is none.
    """
    has_more = bool(reply.calls or reply.reasoning)
    message: dict[str, object] = {
        "role": "assistant",
        "content": reply.content or None if has_more else reply.content,
        "refusal": None,
    }
    if thinks:
        message |= {"reasoning_content": reply.reasoning or None, "reasoning": reply.reasoning or None}
    if reply.calls:
        message["tool_calls"] = [
            _call_of(call.id, {"name": call.name, "arguments": call.arguments}) for call in reply.calls
        ]
    return message


def _call_of(call_id: str, function: dict[str, Any]) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": function}
