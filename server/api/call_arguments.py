"""The arguments of a call that a model wrote, as an object: for replies, and where they come back."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from pydantic_core import from_json


def arguments_in(text: str) -> dict[str, Any]:
    """What a call's arguments hold; nothing where they are no object of JSON's."""
    try:
        found = read_arguments(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_arguments(text: str) -> Any:
    """What a call's arguments hold, as far as they go where they were cut. Raises ValueError for no JSON.

    What models write all the same is read: line breaks that stand in texts as they are, and numbers that
    JSON has not, for which stands null.
    """
    text = text if text.strip() else "{}"
    try:
        found = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        found = _with_bare_breaks(text)
    return _finite(found)


def _with_bare_breaks(text: str) -> Any:
    try:
        found = json.dumps(json.loads(text, strict=False), ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # No half of a surrogate pair is left: nothing could be made of it later.
    return from_json(found.encode("utf-8", "replace"))


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list():
            return [_finite(each) for each in value]
        case float():
            return value if isfinite(value) else None
    return value
