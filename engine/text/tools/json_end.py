"""JsonEnd: finds where a JSON object in growing text ends, each character looked at once."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_CLOSES = {"{": "}", "[": "]"}
MAX_DEPTH = 128


class JsonEnd:
    """Follows strings and brackets only: what is inside may still be no JSON.

    `broken_at` is where in the last text the first character stands with which no object can come of it any
    more; None as long as one may.
    """

    def __init__(self) -> None:
        self.broken_at: int | None = None
        self._open: list[str] = []  # the brackets that are to come, the outermost first
        self._in_string = False
        self._is_escaped = False  # the next character is, in a string

    @property
    def is_broken(self) -> bool:
        """True once no object can come of the text any more."""
        return self.broken_at is not None

    def find(self, text: str, start: int) -> int | None:
        """Where in `text` the object ends, None if it does not; `start` is where the last call's text ended.

        The object begins with the first text of all.
        """
        if not self._open and start < len(text) and text[start] != "{":
            self.broken_at = start
        while start < len(text) and not self.is_broken:
            if self._is_escaped:
                self._is_escaped = False
                start += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, start)
            if found is None:
                return None
            start = found.end()
            if not self._step(found.group(), found.start()):
                return start
        return None

    def _step(self, char: str, at: int) -> bool:
        """Take one character that matters, which stands at `at`; False when it closes the object."""
        if char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        elif char in _CLOSES:
            self._open.append(_CLOSES[char])
            if len(self._open) > MAX_DEPTH:
                self.broken_at = at
        elif self._open.pop() != char:
            self.broken_at = at
        else:
            return bool(self._open)
        return True
