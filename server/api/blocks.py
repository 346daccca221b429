"""Blocks: a reply as the parts that follow each other in it, which Responses calls items and Messages blocks.

The only place where those two APIs meet the pieces of what the model writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from engine import CallArguments, CallEnd, CallStart, ContentText, OutputDelta, Piece, ReasoningText
from server.api.generation import Choice

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One part: text, thoughts, or a call with its arguments, JSON or the text that a custom tool takes.

    `is_cut`: more should follow.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    is_cut: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A part begins, empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """The open part has this much more text, at least one character."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The open part is complete, or cut."""

    block: Block


BlockEvent: TypeAlias = Opened | Grown | Closed


class BlockWriter:
    """Makes blocks of the pieces of one reply: at most one is open at a time, and none at the end."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def write(self, choice: Choice, delta: OutputDelta) -> list[BlockEvent]:
        """What is known with `delta`, which `choice` has noted; with its finish, that is all."""
        reader, ended = choice.reader, delta.finish is not None
        pieces: list[Piece] = [ContentText(delta.text)]  # where nothing is read in it
        if reader is not None:
            pieces = reader.read(delta.text, ended=ended, cut=choice.is_cut)
        events = [event for piece in pieces for event in self._take(piece)]
        return [*events, *self._close(is_cut=choice.is_cut)] if ended else events

    def _take(self, piece: Piece) -> Iterator[BlockEvent]:
        match piece:
            case ReasoningText(text):
                yield from self._grow("reasoning", text)
            case ContentText(text):
                yield from self._grow("text", text)
            case CallStart(_, name, call_id):
                yield from self._begin("call", name, call_id)
            case CallArguments(_, text):
                yield from self._grow("call", text)
            case CallEnd():
                yield from self._close()

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        yield Grown(self._open, text)

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> Iterator[BlockEvent]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, name, call_id)
        self.blocks.append(self._open)
        yield Opened(self._open)

    def _close(self, *, is_cut: bool = False) -> Iterator[BlockEvent]:
        block, self._open = self._open, None
        if block is not None:
            block.is_cut = is_cut
            yield Closed(block)
