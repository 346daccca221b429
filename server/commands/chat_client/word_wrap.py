"""WordWrap: text that comes in pieces, on a terminal of some width, with no word torn by a line's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rich.cells import get_character_cell_size

_TAB: Final = 8


class WordWrap:
    """Writes every piece at once and takes a word back to the next line when it turns out too long.

    `width` says how many columns there are now. A word that is longer than a line is cut, and so is text
    without spaces.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word: list[str] = []

    def feed(self, text: str) -> str:
        """What to write for `text`: its characters, with line ends and cursor movements among them."""
        return "".join(map(self._next, text))

    def _next(self, char: str) -> str:
        if char == "\n":
            self._column, self._word = 0, []
            return char
        cells = _TAB - self._column % _TAB if char == "\t" else get_character_cell_size(char)
        if not cells and not self._word:  # a mark on the space before, which stays where that is
            return char
        is_full = self._column + cells >= self._width()  # a filled last column makes terminals disagree
        self._column += cells
        if char in " \t":
            self._word = []
            if is_full:  # the line's end stands for the space
                self._column = 0
                return "\n"
            return char
        self._word.append(char)
        return self._carried_over(char) if is_full else char

    def _carried_over(self, char: str) -> str:
        """The word in progress, `char` at its end, on a line of its own; or cut, where it has one already."""
        word = "".join(self._word)
        cells = sum(map(get_character_cell_size, word))
        before = cells - get_character_cell_size(char)
        is_first = self._column == cells
        if is_first or (cells > 1 and get_character_cell_size(char) == 2):
            self._column, self._word = cells - before, [char]
            return f"\n{char}"
        self._column = cells
        return f"\x1b[{before}D\x1b[K\n{word}" if before else f"\n{char}"
