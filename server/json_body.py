"""parse_json: from the bytes of a body to a JSON object, strictly and at a bounded cost."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from server.errors import invalid, shown

# The parser makes an object of each and holds the interpreter meanwhile: several hundred milliseconds for as
# many as a large body has room for. Conversations with thousands of messages and tools have fewer.
MAX_PARTS = 200_000

_MARKS = (b"[", b"{", b":")
_QUOTE = ord('"')
# Possessive, so that a string of any length is read without remembering its way.
_MARK_OR_STRING = re.compile(rb'[\[{:]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; strict: no NaN, no lone surrogate, no endless number, nesting or list.

    Raises ApiError. Takes up to some 100 ms for a body of the default limit.
    """
    if has_too_many_parts(body):
        raise invalid(f"The body holds more than {MAX_PARTS} lists, objects and keys.")
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        # The parser's message holds a position and a reason, nothing of the text.
        raise invalid(f"The body is not valid JSON: {shown(str(error))}.") from None
    if not isinstance(data, dict):
        raise invalid("The body must be a JSON object.")
    return data


def has_too_many_parts(json: bytes) -> bool:
    """Whether `json` holds more than `MAX_PARTS` lists, objects and keys; those that text spells are none."""
    if sum(map(json.count, _MARKS)) <= MAX_PARTS:
        return False
    num_parts = 0
    for found in _MARK_OR_STRING.finditer(json):
        num_parts += json[found.start()] != _QUOTE
        if num_parts > MAX_PARTS:
            return True
    return False
