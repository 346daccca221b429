"""What a reply is made of, piece by piece, and Collected, what the pieces amount to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias


def fresh_call_id() -> str:
    """An id for a call; its last characters are letters and digits."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer: text that is neither reasoning nor part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the `index`-th of its reply, from 0. Its arguments follow; text, if it `is_custom`."""

    index: int
    name: str
    id: str = field(default_factory=fresh_call_id)
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text, or plain text where the tool takes free input."""

    index: int
    text: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete. A call that the end of the reply cuts short has none."""

    index: int


Piece: TypeAlias = ReasoningText | ContentText | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class CollectedCall:
    """One call with all of its arguments; `is_whole` is False where the reply ended within it."""

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False
    is_custom: bool = False


@dataclass(slots=True)
class CollectedReply:
    """A reply in one piece."""

    reasoning: str = ""
    content: str = ""
    calls: list[CollectedCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> CollectedReply:
        """What the pieces of one reply join to."""
        reasoning: list[str] = []
        content: list[str] = []
        arguments: list[list[str]] = []
        calls: list[CollectedCall] = []
        for piece in pieces:
            match piece:
                case ReasoningText(text):
                    reasoning.append(text)
                case ContentText(text):
                    content.append(text)
                case CallStart(_, name, call_id, is_custom):
                    calls.append(CollectedCall(call_id, name, is_custom=is_custom))
                    arguments.append([])
                case CallArguments(index, text):
                    arguments[index].append(text)
                case CallEnd(index):
                    calls[index].is_whole = True
        for call, texts in zip(calls, arguments, strict=True):
            call.arguments = "".join(texts)
        return cls("".join(reasoning), "".join(content), calls)
