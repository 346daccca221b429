"""Finds stop strings in a text that arrives in pieces, in time linear in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """`stop` ends just before index `end` of the piece that completed it; it may begin in an earlier one."""

    stop: str
    end: int


class StopMatcher:
    """The stop strings of one request and how much of each the text seen so far ends with.

    Each stop string is an automaton of its own (Knuth, Morris and Pratt, "Fast pattern matching in strings",
    1977), so that no text is looked at twice and the result does not depend on where the text was cut.
    The match that is completed first wins; of those completed by the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text so far that could still grow into a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, ignore: bool = False) -> StopMatch | None:
        """The stop string that `text`, put after all the text before it, completes; None when there is none.

        With `ignore`, strings completed here do not count, but ones that begin here and end later do.
        """
        best: StopMatch | None = None
        for index, stop in enumerate(self._stops):
            end = self._scan(index, text, ignore)
            if end is None:
                continue
            if best is None or (end, -len(stop)) < (best.end, -len(best.stop)):
                best = StopMatch(stop, end)
        return best

    def _scan(self, index: int, text: str, ignore: bool) -> int | None:
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        position, end = 0, None
        while position < len(text):
            if matched == 0:
                position = text.find(stop[0], position)  # to the next possible start at C speed
                if position < 0:
                    break
            while matched and stop[matched] != text[position]:
                matched = borders[matched - 1]
            if stop[matched] == text[position]:
                matched += 1
            position += 1
            if matched == len(stop):
                if not ignore:
                    end = position
                    break
                matched = borders[matched - 1]
        self._matched[index] = matched
        return end


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        if stop[length] == stop[index]:
            length += 1
        borders[index] = length
    return borders
