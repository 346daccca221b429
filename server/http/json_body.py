"""parse_json: from the bytes of a body to a JSON object, strictly and at a bounded cost."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from server.http.errors import invalid, shown

# The parser makes an object of each and holds the interpreter meanwhile: several hundred milliseconds for as
# many as a large body has room for. Conversations with thousands of messages and tools have fewer parts, and
# the longest prompts of token ids fewer values.
MAX_PARTS = 200_000
MAX_VALUES = 1_200_000

_PART, _COMMA, _QUOTE = b"[{:", ord(","), ord('"')
# Possessive, so that a string of any length is read without remembering its way.
_MARK_OR_STRING = re.compile(rb'[\[{:,]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; strict: no NaN, no lone surrogate, no endless number, nesting or list.

    Raises ApiError. Takes up to some 100 ms for a body of the default limit.
    """
    if (too_many := find_too_many(body)) is not None:
        raise invalid(f"The body holds {too_many}.")
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        # The parser's message holds a position and a reason, nothing of the text.
        raise invalid(f"The body is not valid JSON: {shown(str(error))}.") from None
    if not isinstance(data, dict):
        raise invalid("The body must be a JSON object.")
    return data


def find_too_many(json: bytes) -> str | None:
    """What `json` holds more of than is read, None if nothing; whatever text spells does not count."""
    marks = {mark: json.count(mark) for mark in b"[{:,"}
    if marks[_COMMA] <= MAX_VALUES and sum(marks[mark] for mark in _PART) <= MAX_PARTS:
        return None
    num_parts = num_values = 0
    for found in _MARK_OR_STRING.finditer(json):
        mark = json[found.start()]
        num_values += mark == _COMMA
        num_parts += mark in _PART
        if num_parts > MAX_PARTS:
            return f"more than {MAX_PARTS} lists, objects and keys"
        if num_values > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
    return None
