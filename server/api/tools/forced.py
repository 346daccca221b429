"""ForcedReader: reads a reply that a grammar makes of calls only, and tells arguments as they are written."""

from __future__ import annotations

import re

from server.api.tools.json_end import JsonEnd
from server.api.tools.pieces import CallArguments, CallStart, ContentText, Piece

# Whatever stands before it is the format's. The grammar writes the keys in this order.
_HEAD = re.compile(r'[^{]*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ForcedReader:
    """See CallReader. A reply that is cut short leaves the last call's arguments incomplete.

    What is cut before the first call's arguments begin is content: there is no call yet.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._text = ""  # not told yet
        self._end: JsonEnd | None = None  # of the arguments that are read; None between calls

    def feed(self, text: str) -> list[Piece]:
        """See CallReader."""
        self._text += text
        pieces: list[Piece] = []
        while self._read_head(pieces) if self._end is None else self._read_arguments(self._end, pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See CallReader."""
        text, self._text = self._text, ""
        return [ContentText(text)] if text and not self._num_calls else []

    def _read_head(self, pieces: list[Piece]) -> bool:
        """Up to where the arguments begin."""
        head = _HEAD.match(self._text)
        if head is None:
            return False
        self._text, self._end = self._text[head.end() :], JsonEnd()
        pieces.append(CallStart(self._num_calls, head[1]))
        self._num_calls += 1
        return True

    def _read_arguments(self, end: JsonEnd, pieces: list[Piece]) -> bool:
        """Up to where the arguments end, or as far as there is text."""
        size = end.find(self._text, 0)
        told, self._text = self._text[:size], "" if size is None else self._text[size:]
        if told:
            pieces.append(CallArguments(self._num_calls - 1, told))
        if size is None:
            return False
        self._end = None
        return True
