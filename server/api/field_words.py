"""What a client is told of a wrong field: pydantic's findings in plain words, and the name that was meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.http.errors import ApiError, invalid, shown

_MAX_ERRORS_SHOWN = 5
_TAG = re.compile("<[a-z_]+>")
_LARGEST_SHOWN = 10**20
_MAX_COMPARED = 64  # characters of a name: comparing takes the square of it
_LIKENESS = 0.82  # `temprature` and `temperature` have 0.95, `sed` and `seed` 0.86, `top_p` and `top_k` 0.8

# By pydantic's name for a kind of finding. {given} is the number that was sent, or the kind of value.
_WORDS: Mapping[str, str] = {
    "missing": "is missing",
    "model_type": "must be an object, not {given}",
    "dict_type": "must be an object, not {given}",
    "list_type": "must be a list, not {given}",
    "string_type": "must be a string, not {given}",
    "int_type": "must be a whole number, not {given}",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number, not {given}",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false, not {given}",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}, not {given}",
    "greater_than_equal": "must be at least {ge}, not {given}",
    "less_than_equal": "must be at most {le}, not {given}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "has too many entries; the limit is {max_length}",
    "extra_forbidden": "is not a known field",
}
_NO_WORDS = "has a value that is not allowed here"
_TOO_SHORT = ("too_short", "string_too_short")
_OWN = "bad_value"  # of `protocol_values.refuse`, which says what is wrong itself


def describe(error: ValidationError) -> ApiError:
    """The 400 for what pydantic found: the first field as `param`, the first few in the message."""
    found = error.errors(include_url=False)
    fields = [(field_path(each["loc"]), reason_of(each)) for each in found[:_MAX_ERRORS_SHOWN]]
    message = "; ".join(f"'{name}' {reason}" for name, reason in fields)
    more = len(found) - len(fields)
    return invalid(message + (f"; and {more} more" if more else "") + ".", fields[0][0])


def field_path(loc: Sequence[int | str]) -> str:
    """A pydantic location as OpenAI spells it: messages[0].content. The tag of a union is <in brackets>."""
    steps = [step for step in loc if isinstance(step, int) or not _TAG.fullmatch(step)]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return shown(path.removeprefix("."))


def reason_of(found: ErrorDetails) -> str:
    """What is wrong with a field, to be read after its name; it holds no text of the client's."""
    kind, limits = found["type"], found.get("ctx", {})
    if kind == _OWN:
        return found["msg"]
    if kind in _TOO_SHORT:
        least = limits["min_length"]
        return "must not be empty" if least == 1 else f"is too short; the least is {least}"
    number = _number_text(found["input"])
    return _WORDS.get(kind, _NO_WORDS).format(
        **{name: _number_text(limit) or limit for name, limit in limits.items()},
        given=number or kind_of(found["input"]),
    )


def _number_text(value: object) -> str:
    """A number as it would be written, where that is short; nothing for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return str(value).removesuffix(".0") if abs(value) <= _LARGEST_SHOWN else "a number far beyond it"


def kind_of(value: object) -> str:
    """The kind of a JSON value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The name among `known` that `name` is probably a misspelling of, None if there is none."""
    if len(name) > _MAX_COMPARED:
        return None
    matches = get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=_LIKENESS)
    return matches[0] if matches else None
