"""Pieces of a reply as OpenAI's messages and deltas show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.api.tools.pieces import CallArguments, CallStart, ContentText, Piece
from server.api.tools.turn import ToolTurn


def delta_of(piece: Piece) -> dict[str, object]:
    """The `delta` of a stream's chunk."""
    match piece:
        case ContentText(text):
            return {"content": text}
        case CallStart(index, name, call_id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ToolReply:
    """One choice's reply as OpenAI's objects show it: read in parts, or as a whole."""

    def __init__(self, turn: ToolTurn) -> None:
        self._reader = turn.reader()
        self._is_named = turn.choice.kind == "function"
        self._has_calls = False

    @property
    def ends_with_calls(self) -> bool:
        """True when `tool_calls` is why it ends: OpenAI says `stop` of a call of the function asked for."""
        return self._has_calls and not self._is_named

    def read(self, text: str, *, ended: bool) -> list[dict[str, object]]:
        """The deltas that show what is known with `text`."""
        return [delta_of(piece) for piece in self._pieces(text, ended)]

    def whole(self, text: str) -> dict[str, object]:
        """What the message holds of the whole `text`; `content` is null where there are calls and no more."""
        content, calls = join_pieces(self._pieces(text, True))
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def _pieces(self, text: str, ended: bool) -> list[Piece]:
        pieces = [*self._reader.feed(text), *(self._reader.finish() if ended else ())]
        self._has_calls = self._has_calls or any(isinstance(piece, CallStart) for piece in pieces)
        return pieces


def join_pieces(pieces: Iterable[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """The content and the calls that the pieces amount to."""
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case ContentText(text):
                content.append(text)
            case CallStart(_, name, call_id):
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    return "".join(content), calls
