"""Reading large JSON in many short runs of the parser, which holds the interpreter for the whole of each.

The text is scanned for its brackets first, a window at a time. What lies between two commas of one list or
object goes to the parser as soon as it is long enough; only the pieces are put together here.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import from_json

WINDOW = 16_384  # bytes of one run: a few milliseconds, whatever they hold
MAX_DEPTH = 200  # the parser's own

Rest: TypeAlias = Callable[[], None]  # called between two short runs, so that others can have theirs

_BACKSLASH, _QUOTE, _LIST = b'\\"['
_OPEN, _CLOSE, _BLANKS = b"[{", b"]}", b" \t\r\n"
# What is repeated possessively is an atomic group each time: else the `re` of Python 3.11.2, which is Debian
# 12's, misses what it should match.
_STRING = rb'(?>"(?>[^"\\]++|\\.)*+")'
_FLAT = rb'(?>(?>[^\[\]{}"]++|' + _STRING + rb")*+)"
# A value with its key, or a list or object that holds none itself.
_ELEMENT = rb'(?>(?>[^\[\]{}",]++|' + _STRING + rb"|\[" + _FLAT + rb"\]|\{" + _FLAT + rb"\})*+)"
# Whole elements up to a last comma, and what follows it; strings as far as they end within the window.
_RUN = re.compile(rb"((?>" + _ELEMENT + rb",)*+)" + _ELEMENT, re.DOTALL)
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_ANYTHING = re.compile(rb'(?>[^"]++|' + _STRING + rb")*+", re.DOTALL)
# A part of a string that ends with no escape begun.
_STRING_PART = re.compile(rb'(?>[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_PLACE = re.compile(r" at line \d+ column \d+$")


class Found(NamedTuple):
    """A bracket, a string longer than a window, or (`mark` 0) anything that is flat: `start` to `end`.

    `comma` is the last one of a list or object within, -1 for none.
    """

    mark: int
    start: int
    end: int
    comma: int = -1


def scan(text: bytes | bytearray) -> Iterator[Found]:
    """The brackets around more than flat values, and what lies between them; what strings hold is none."""
    position, size = 0, len(text)
    while position < size:
        run = _RUN.match(text, position, position + WINDOW)
        assert run is not None  # it matches nothing as well
        if run.end() > position:
            yield Found(0, position, run.end(), run.end(1) - 1 if run.end(1) > position else -1)
            position = run.end()
            if position == size:
                return
        mark = text[position]
        if mark == _QUOTE:
            whole = _WHOLE_STRING.match(text, position, position + WINDOW)
            end = _end_of_string(text, position) if whole is None else whole.end()
            yield Found(_QUOTE if whole is None else 0, position, end)
            position = end
        elif mark in _OPEN or mark in _CLOSE:
            yield Found(mark, position, position + 1)
            position += 1


def _end_of_string(text: bytes | bytearray, start: int) -> int:
    """Behind its closing quote, or the end of the text where there is none."""
    position = start + 1
    while position < len(text):
        if text[position] == _QUOTE:
            return position + 1
        part = _STRING_PART.match(text, position, position + WINDOW)
        assert part is not None
        # No part is an escape cut short by the window's end, or none at all, which the parser will tell.
        position = part.end() if part.end() > position else position + 2
    return len(text)


def do_nothing() -> None:
    """The Rest of those that nobody waits for."""


def count_marks(text: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """(lists, objects and keys; commas) of each window of `text`, without what its strings hold."""
    position = 0
    while position < len(text):
        found = _ANYTHING.match(text, position, position + WINDOW)
        assert found is not None  # it matches nothing as well
        if found.end() == position:  # a string longer than a window
            position = _end_of_string(text, position)
            continue
        bare = _WHOLE_STRING.sub(b"", text[position : found.end()])
        yield sum(map(bare.count, (b"[", b"{", b":"))), bare.count(b",")
        position = found.end()


class _State(enum.Enum):
    """What was read of a list or object last."""

    START = enum.auto()
    COMMA = enum.auto()  # an element must follow
    ELEMENT = enum.auto()  # a comma or the end must


@dataclass(slots=True)
class _Level:
    """A list or object that is open, from its bracket at `opened` on.

    `value` is what was read of it, None while all of it is still text. Text from `begins` on is not yet read;
    `comma` is the last one there, -1 for none.
    """

    kind: int
    opened: int
    begins: int
    value: Any = None
    comma: int = -1
    state: _State = _State.START


def read_in_parts(text: bytes | bytearray, rest: Rest = do_nothing) -> Any:
    """What `from_json` makes of `text`, without NaN, but in many short runs with a `rest` after each.

    Raises ValueError.
    """
    return _Reader(text, rest).read()


class _Reader:
    """One text being read."""

    def __init__(self, text: bytes | bytearray, rest: Rest) -> None:
        self._text = text
        self._rest = rest
        # The whole is the one element of a list whose brackets are not there.
        self._levels = [_Level(_LIST, 0, 0)]

    def read(self) -> Any:
        for found in scan(self._text):
            level = self._levels[-1]
            if found.mark == 0:
                level.comma = max(level.comma, found.comma)
                self._relieve(level, found.end)
            elif found.mark == _QUOTE:
                if self._is_key(level, found.start):
                    continue  # it stays text
                self._put(level, found.start, found.end, self._string(found.start, found.end))
            elif found.mark in _OPEN:
                if len(self._levels) > MAX_DEPTH:
                    raise ValueError("recursion limit exceeded")
                self._levels.append(_Level(found.mark, found.start, found.end))
            else:
                self._close(found)
        if len(self._levels) > 1:
            raise ValueError("EOF while parsing a list or an object")
        values = self._take(self._levels[0], len(self._text), closes=True)
        if len(values) != 1:
            raise ValueError("trailing characters" if values else "EOF while parsing a value")
        return values[0]

    def _is_key(self, level: _Level, start: int) -> bool:
        before = self._text[max(level.begins, level.comma + 1) : start]
        return level.kind != _LIST and not before.strip(_BLANKS)

    def _close(self, found: Found) -> None:
        level = self._levels.pop()
        if not self._levels or _CLOSE[_OPEN.index(level.kind)] != found.mark:
            raise ValueError(f"unexpected '{chr(found.mark)}' at byte {found.start}")
        outer = self._levels[-1]
        if level.value is None:  # small: it stays text, to be read with its neighbours
            self._relieve(outer, found.end)
        else:
            self._put(outer, level.opened, found.end, self._take(level, found.start, closes=True))

    def _relieve(self, level: _Level, end: int) -> None:
        """Read what has grown long enough."""
        if end - level.begins > WINDOW and level.comma >= level.begins:
            self._take(level, level.comma, closes=False)

    def _put(self, level: _Level, start: int, end: int, element: Any) -> None:
        """Add an element that has been read by itself."""
        if level.comma >= level.begins:
            self._take(level, level.comma, closes=False)
        before = self._text[level.begins : start]
        if level.state is _State.ELEMENT:
            raise ValueError(f"expected a comma before byte {start}")
        if level.kind == _LIST:
            if before.strip(_BLANKS):
                raise ValueError(f"expected a comma before byte {start}")
            level.value = [] if level.value is None else level.value
            level.value.append(element)
        else:
            (name,) = self._parse(b"{" + before + b" null}", level.begins) or (None,)
            if name is None:
                raise ValueError(f"expected a key before byte {start}")
            level.value = {} if level.value is None else level.value
            level.value[name] = element
        level.begins, level.state = end, _State.ELEMENT

    def _take(self, level: _Level, end: int, *, closes: bool) -> Any:
        """Read the text up to `end`, which is a comma or closes the level; all of its value so far."""
        text = self._text[level.begins : end]
        may_be_blank = closes and level.state is _State.START
        if level.state is _State.ELEMENT:
            text = text.lstrip(_BLANKS)
            may_be_blank = not text
            if text and not text.startswith(b","):
                raise ValueError(f"expected a comma behind byte {level.begins}")
            text = text[1:]
        if text.strip(_BLANKS):
            self._add(level, text)
        elif not may_be_blank:
            raise ValueError(f"expected a value at byte {end}")
        elif level.value is None:
            level.value = [] if level.kind == _LIST else {}
        level.begins, level.state = end + 1, _State.COMMA
        return level.value

    def _add(self, level: _Level, text: bytes | bytearray) -> None:
        if level.kind == _LIST:
            values = self._parse(b"[" + text + b"]", level.begins)
            level.value = values if level.value is None else level.value
            if level.value is not values:
                level.value += values
        else:
            level.value = {} if level.value is None else level.value
            level.value.update(self._parse(b"{" + text + b"}", level.begins))

    def _string(self, start: int, end: int) -> str:
        """A long string, read in parts that cut no character in two."""
        text, parts, position = self._text, [], start + 1
        if end - start < 2 or text[end - 1] != _QUOTE:
            raise ValueError("EOF while parsing a string")
        last = end - 1
        while position < last:
            found = _STRING_PART.match(text, position, min(position + WINDOW, last))
            cut = last if found is None else _whole_characters(text, position, found.end(), last)
            parts.append(self._parse(b'"' + text[position:cut] + b'"', position))
            position = cut
        return "".join(parts)

    def _parse(self, text: bytes | bytearray, place: int) -> Any:
        self._rest()
        try:
            return from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"{_PLACE.sub('', str(error))} behind byte {place}") from None


def _whole_characters(text: bytes | bytearray, start: int, cut: int, last: int) -> int:
    """`cut` or a little before it, so that no character is cut; what is no text of any is left whole."""
    if cut == last:
        return cut
    earlier = cut
    while earlier > start and text[earlier] & 0xC0 == 0x80:
        earlier -= 1
    if _HIGH_SURROGATE.fullmatch(text, earlier - 6, earlier):
        backslash = earlier - 6
        while text[backslash] == _BACKSLASH:
            backslash -= 1
        if (earlier - 6 - backslash) % 2:  # it is not itself escaped
            earlier -= 6
    return earlier if earlier > start else min(start + WINDOW, last)
