"""parse_json: from the bytes of a body to a JSON object, strictly and at a bounded cost."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from server.http.errors import invalid, shown
from server.http.json_parts import WINDOW, count_marks, read_in_parts

# The parser makes an object of each: more memory than the body by far. Conversations with thousands of
# messages and tools have fewer parts, and the longest prompts of token ids fewer values.
MAX_PARTS = 200_000
MAX_VALUES = 1_200_000


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`; strict: no NaN, no lone surrogate, no endless number, nesting or list.

    Raises ApiError. Takes up to a second for a body of the default limit, and the interpreter for a few
    milliseconds at a time.
    """
    if (too_many := find_too_many(body)) is not None:
        raise invalid(f"The body holds {too_many}.")
    try:
        data = from_json(body, allow_inf_nan=False) if len(body) <= WINDOW else read_in_parts(body)
    except ValueError as error:
        # The parser's message holds a position and a reason, nothing of the text.
        raise invalid(f"The body is not valid JSON: {shown(str(error))}.") from None
    if not isinstance(data, dict):
        raise invalid("The body must be a JSON object.")
    return data


def find_too_many(json: bytes | bytearray) -> str | None:
    """What `json` holds more of than is read, None if nothing; whatever text spells does not count."""
    num_values = json.count(b",")
    if num_values <= MAX_VALUES and sum(map(json.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return None
    num_parts = num_values = 0
    for parts, values in count_marks(json):
        num_parts += parts
        num_values += values
        if num_parts > MAX_PARTS:
            return f"more than {MAX_PARTS} lists, objects and keys"
        if num_values > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
    return None
