"""ReplyReader: reads one reply as it comes, and counts what was thought in it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.reply.pieces import CallStart, CollectedReply, ContentText, Piece
from engine.text.reply.reasoning_place import Place, ReasoningTrack
from engine.text.reply.text_feed import Stage


class ReplyReader:
    """Turns the text of one choice into pieces; made by `ReplyFormat.reader`.

    However the text is split, the pieces join to the same reply, and nothing of a mark is ever told. `count`
    and `read` may be called independently of each other: one takes tokens, the other their text. For one
    thread at a time; nothing that a model writes makes it raise.
    """

    def __init__(self, stages: Sequence[Stage], track: ReasoningTrack | None, place: Place | None) -> None:
        self._stages = stages
        self._track = track
        self._place = place
        self.has_calls = False

    @property
    def thinks(self) -> bool:
        """True for a model that may think before it answers."""
        return self._track is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning among those that were counted."""
        return 0 if self._place is None else max(0, self._place.num_thought)

    def count(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the reply."""
        if self._track is None or self._place is None:
            return
        for token_id in token_ids:
            self._place = self._track.step(self._place, token_id)

    def read(self, text: str, *, ended: bool = False, cut: bool = False) -> list[Piece]:
        """The pieces that are known with the next `text`; what may yet be part of a mark is kept back.

        `ended`: no more comes; `cut`: and it was not the model that ended the reply.
        """
        pieces: list[Piece] = [ContentText(text)] if text else []
        for stage in self._stages:
            pieces = _through(stage, pieces, ended, cut)
        self.has_calls = self.has_calls or any(isinstance(piece, CallStart) for piece in pieces)
        return pieces

    def whole(self, text: str, *, cut: bool = False) -> CollectedReply:
        """What the whole text comes to."""
        return CollectedReply.of(self.read(text, ended=True, cut=cut))


def _through(stage: Stage, pieces: Sequence[Piece], ended: bool, cut: bool) -> list[Piece]:
    """The pieces with all content read by `stage`."""
    told: list[Piece] = []
    for piece in pieces:
        told += stage.feed(piece.text) if isinstance(piece, ContentText) else [piece]
    return told + stage.finish(cut=cut) if ended else told
