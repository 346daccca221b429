"""MarkedReader: finds calls that the model made of its own accord, between the marks of its template family.

A call is sent only when it is whole and valid, because nothing sent can be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

from server.api.tools.json_end import JsonEnd
from server.api.tools.pieces import CallArguments, CallStart, ContentText, Piece

_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How calls stand in text: `opening`, a JSON object, then `closing`; any whitespace around each.

    `bracket` follows the opening mark; `between` leads to another object without one. Empty is no such mark.
    `bare` calls need no opening mark where the reply begins.
    """

    opening: str
    closing: str = ""
    bracket: str = ""
    between: str = ""
    bare: bool = False


class MarkedReader:
    """See CallReader. Only functions in `names` are called, at most `most` times; more calls are left out.

    Whitespace next to a call belongs to the format, and is no content.
    """

    def __init__(self, marks: CallMarks, names: Collection[str], most: int) -> None:
        self._marks = marks
        self._names = names
        self._most = most
        self._num_calls = 0
        self._text = ""  # not yet known to be content or not
        self._opened = 0  # length of the opening mark in it, while a call is read
        self._looked_at = 0  # how far in it the end of the call's object was looked for
        self._end = JsonEnd()
        self._read: Callable[[list[Piece]], bool] = self._read_start if marks.bare else self._read_content

    def feed(self, text: str) -> list[Piece]:
        """See CallReader."""
        self._text += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See CallReader: what is left is no call, and no content either if it is the space after one."""
        text, self._text = self._text, ""
        kept = text.strip() or (text and not self._num_calls)
        return [ContentText(text)] if kept else []

    # Each reads a part of `_text`, and returns False when it needs more of it.

    def _read_start(self, pieces: list[Piece]) -> bool:
        """Where the reply begins."""
        text = self._text.lstrip()
        if not text:
            return False
        self._read = self._read_content
        if text[0] == "{":
            self._open(len(self._text) - len(text), self._read_object)
        return True

    def _read_content(self, pieces: list[Piece]) -> bool:
        """Outside of calls."""
        opening = self._marks.opening
        at = self._text.find(opening)
        if at >= 0:
            self._tell(len(self._text[:at].rstrip()), pieces)
            self._open(
                self._text.find(opening) + len(opening),
                self._read_bracket if self._marks.bracket else self._read_object,
            )
            return True
        kept = next(size for size in range(len(opening) - 1, -1, -1) if self._text.endswith(opening[:size]))
        self._tell(len(self._text[: len(self._text) - kept].rstrip()), pieces)
        return False

    def _read_bracket(self, pieces: list[Piece]) -> bool:
        """Behind the opening mark."""
        found = self._match(self._opened, self._marks.bracket)
        if found is None:
            return False
        if found:
            self._open(found, self._read_object)
        else:
            self._give_back(pieces)
        return True

    def _read_object(self, pieces: list[Piece]) -> bool:
        """Inside of a call."""
        if self._looked_at == self._opened:  # before its first character
            rest = self._text[self._opened :]
            self._opened = self._looked_at = len(self._text) - len(rest.lstrip())
        end = self._end.find(self._text, self._looked_at)
        self._looked_at = len(self._text)
        if end is None and not self._end.is_broken:
            return False
        call = None if end is None else read_call(self._text[self._opened : end], self._names)
        if call is None:
            self._give_back(pieces)
            return True
        if self._num_calls < self._most:
            pieces += [CallStart(self._num_calls, call[0]), CallArguments(self._num_calls, call[1])]
            self._num_calls += 1
        self._text = self._text[end:]
        self._read = self._read_after
        return True

    def _read_after(self, pieces: list[Piece]) -> bool:
        """Behind a call."""
        marks = self._marks
        another = self._match(0, marks.between) if marks.between else 0
        if another:
            self._open(another, self._read_object)
            return True
        closed = self._match(0, marks.closing) if marks.closing else 0
        if another is None or closed is None:
            return False
        self._text = self._text[closed:]
        self._read = self._read_content
        return True

    def _open(self, opened: int, read: Callable[[list[Piece]], bool]) -> None:
        self._opened = self._looked_at = opened
        self._end, self._read = JsonEnd(), read

    def _match(self, start: int, mark: str) -> int | None:
        """Where `mark` ends, behind whitespace at `start`; 0 if something else is there, None if unknown."""
        rest = self._text[start:].lstrip()
        if rest.startswith(mark):
            return len(self._text) - len(rest) + len(mark)
        return None if mark.startswith(rest) else 0

    def _give_back(self, pieces: list[Piece]) -> None:
        """No call after all: the mark is content, and what follows is read anew."""
        self._tell(max(1, self._opened), pieces)
        self._read = self._read_content

    def _tell(self, size: int, pieces: list[Piece]) -> None:
        if size:
            pieces.append(ContentText(self._text[:size]))
            self._text = self._text[size:]


def read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """A function's name and the JSON text of its arguments; None if `text` is no call of one in `names`."""
    try:
        call = json.loads(text, parse_constant=_refuse_constant)
        arguments = next((call[key] for key in _ARGUMENT_KEYS if key in call), None)
        if isinstance(arguments, str):  # some models quote them, as OpenAI's own format does
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        if not isinstance(arguments, dict) or call.get("name") not in names:
            return None
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
