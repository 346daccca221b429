"""parse_json: from the bytes of a body to a JSON object, strictly and at a bounded cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from server.http.errors import invalid
from server.http.json_parts import WINDOW, Rest, count_marks, do_nothing, read_in_parts

# The parser makes an object of each: more memory than the body by far. Conversations with thousands of
# messages and tools have fewer parts, and the longest prompts of token ids fewer values.
MAX_PARTS = 200_000
MAX_VALUES = 1_200_000
_PLACE = re.compile(r"(?:at line [0-9]+ column|(?:at|before|behind) byte) [0-9]+$")
# By what the parser's message begins with: the reason in words that need no knowledge of parsers.
_REASONS: Mapping[str, str] = {
    "EOF while parsing": "it ends too early",
    "unexpected end of hex escape": "a string has half of a surrogate pair",
    "lone leading surrogate": "a string has half of a surrogate pair",
    "control character": "a string has a line break or control character that is not escaped",
    "invalid escape": "a string has a backslash before a character that needs none",
    "invalid unicode": "a string is not UTF-8",
    "key must be a string": "a key is not in double quotes",
    "expected a key": "a key is not in double quotes",
    "expected `:`": "a colon is missing",
    "expected `,`": "a comma or a closing bracket is missing",
    "expected a comma": "a comma or a closing bracket is missing",
    "trailing comma": "nothing follows a comma",
    "trailing characters": "something follows its end",
    "recursion limit": "it is nested too deeply",
    "invalid number": "a number is not written as JSON has it",
    "number out of range": "a number has too many digits",
    "unexpected '": "a bracket closes what is not open",
}
_NO_VALUE = "a value is missing or misspelt (strings take double quotes, and there is no NaN)"


def parse_json(body: bytes | bytearray, rest: Rest = do_nothing) -> dict[str, Any]:
    """The JSON object in `body`; strict: no NaN, no lone surrogate, no endless number, nesting or list.

    Raises ApiError. Takes up to a second for a body of the default limit, and the interpreter for a few
    milliseconds at a time, with a `rest` after each.
    """
    if (too_many := find_too_many(body, rest)) is not None:
        raise invalid(f"The body holds {too_many}.")
    try:
        data = from_json(body, allow_inf_nan=False) if len(body) <= WINDOW else read_in_parts(body, rest)
    except ValueError as error:
        raise invalid(_what_is_wrong(body, str(error))) from None
    if not isinstance(data, dict):
        raise invalid("The body must be a JSON object.")
    return data


def _what_is_wrong(body: bytes | bytearray, message: str) -> str:
    """The parser's `message`, which holds a reason and a place, in plain words."""
    if len(body) <= WINDOW and not body.strip():
        return "The body is empty: it must be a JSON object."
    reason = next((each for start, each in _REASONS.items() if message.startswith(start)), _NO_VALUE)
    place = _PLACE.search(message)
    where = "" if place is None else f", {place[0].replace(' column', ', column')}"
    return f"The body is not valid JSON: {reason}{where}."


def find_too_many(json: bytes | bytearray, rest: Rest = do_nothing) -> str | None:
    """What `json` holds more of than is read, None if nothing; whatever text spells does not count."""
    num_values = json.count(b",")
    if num_values <= MAX_VALUES and sum(map(json.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return None
    num_parts = num_values = 0
    for parts, values in count_marks(json):
        rest()
        num_parts += parts
        num_values += values
        if num_parts > MAX_PARTS:
            return f"more than {MAX_PARTS} lists, objects and keys"
        if num_values > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
    return None
