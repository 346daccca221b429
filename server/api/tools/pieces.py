"""What a reply with tool calls is made of, piece by piece, and CallReader, which finds the pieces."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


def fresh_call_id() -> str:
    """An id for a call; its last characters are letters and digits."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the reply that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the `index`-th of its reply, from 0. Its arguments follow."""

    index: int
    name: str
    id: str = field(default_factory=fresh_call_id)


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = ContentText | CallStart | CallArguments


class CallReader(Protocol):
    """Reads one reply as it grows. However the text is split, the pieces join to the same reply.

    Text that only looked like a call comes back as content. Nothing a model writes makes it raise.
    """

    def feed(self, text: str) -> Sequence[Piece]:
        """The pieces that are known with `text`; what may yet turn out to be a call is kept back."""
        ...

    def finish(self) -> Sequence[Piece]:
        """What was kept back, once the reply has ended."""
        ...
