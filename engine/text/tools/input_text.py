"""InputText: the plain text in the arguments of a custom tool's call, as they come."""

from __future__ import annotations

import json
import re

from engine.text.tools.tool_spec import INPUT_KEY

_SPACE = r"\s{0,64}"  # looked through again with every token until the text begins
_HEAD = re.compile(rf'\A{_SPACE}\{{{_SPACE}"{INPUT_KEY}"{_SPACE}:{_SPACE}"')
_BODY = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # of a character that JSON writes as two


class InputText:
    """Decodes the one string of `{"input": "..."}`, however it is split; other JSON stays as it is."""

    def __init__(self) -> None:
        self._rest = ""  # what has come and is not told yet
        self._is_open = False
        self._is_over = False

    def feed(self, text: str) -> str:
        """The text that is known with more of the arguments."""
        self._rest += text
        if self._is_over:
            return ""
        if not self._is_open:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._rest, self._is_open = self._rest[head.end() :], True
        body = _BODY.match(self._rest)
        size = 0 if body is None else body.end()
        ends = self._rest[size : size + 1] == '"'
        if not ends and (half := _HALF.search(self._rest[:size])) is not None:
            size = half.start()
        taken, self._rest, self._is_over = self._rest[:size], self._rest[size:], ends
        return str(json.loads(f'"{taken}"', strict=False))

    def finish(self) -> str:
        """The rest, once the call is complete: all of it, where the model has called it in another way."""
        return "" if self._is_open else self._rest
