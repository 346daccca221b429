"""Pieces of a reply as OpenAI's messages and deltas show them."""

from __future__ import annotations

from collections.abc import Sequence

from engine import CallArguments, CallEnd, CallStart, CollectedReply, ContentText, Piece, ReasoningText


def deltas_of(pieces: Sequence[Piece], *, is_legacy: bool = False) -> list[dict[str, object]]:
    """The `delta` of each chunk of a stream that shows these pieces.

    `is_legacy`: a call is told by the older field, which holds one.
    """
    deltas = [delta for piece in pieces if (delta := _delta_of(piece)) is not None]
    return [_legacy(delta) for delta in deltas] if is_legacy else deltas


def _legacy(message: dict[str, object]) -> dict[str, object]:
    """The message, or a part of one, with its one call in the older field."""
    calls = message.pop("tool_calls", None)
    return {**message, "function_call": calls[0]["function"]} if isinstance(calls, list) else message


def _delta_of(piece: Piece) -> dict[str, object] | None:
    match piece:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, name, call_id, is_custom):
            return {"tool_calls": [{"index": index, **_call_of(call_id, name, "", is_custom=is_custom)}]}
        case CallArguments(index, text, is_custom):
            more = {"custom": {"input": text}} if is_custom else {"function": {"arguments": text}}
            return {"tool_calls": [{"index": index, **more}]}
        case CallEnd():
            return None


def message_of(reply: CollectedReply, *, thinks: bool, is_legacy: bool = False) -> dict[str, object]:
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
            _call_of(call.id, call.name, call.arguments, is_custom=call.is_custom) for call in reply.calls
        ]
    return _legacy(message) if is_legacy else message


def _call_of(call_id: str, name: str, text: str, *, is_custom: bool) -> dict[str, object]:
    if is_custom:
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
